"""Datagram sockets between processes of one server, in Linux's abstract namespace.

Such a socket is nothing in the file system: it ends with its owner, however that ends.
"""

import secrets


def new_socket_name() -> str:
    """Unlike any other on this machine; without the leading zero byte, so that it travels as text."""
    return f"omni-server-{secrets.token_hex(8)}"


def socket_address(name: str) -> str:
    """What `bind` and `sendto` take."""
    return f"\0{name}"
