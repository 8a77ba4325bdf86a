"""Datagram sockets between processes of one server, in Linux's abstract namespace.

Such a socket is not in the file system: it ends with its owner, however that ends. It has no permissions
either: any process in the network namespace can find it in /proc/net/unix and send to it. The kernel is
therefore asked for the sender of each datagram, and datagrams of other users are dropped.
"""

import os
import secrets
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress

_CREDENTIALS = struct.Struct("=iII")
"""`struct ucred`: pid, uid, gid; see unix(7)."""


def new_socket_name() -> str:
    """Returns a name that is unique on this machine, without the leading zero byte, so that it can be sent as
    text."""
    return f"omni-server-{secrets.token_hex(8)}"


def socket_address(name: str) -> str:
    return f"\0{name}"


def bound_socket(name: str) -> socket.socket:
    """Returns a new socket that receives under this name."""
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        receiver.bind(socket_address(name))
    except OSError:
        receiver.close()
        raise
    return receiver


def send_datagram(message: bytes, names: Iterable[str]) -> None:
    """Sends to each of the named sockets. Never blocks and never fails: the message is lost if there is no
    listener, or if it is so slow that its socket is full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        for name in names:
            with suppress(OSError):
                sender.sendto(message, socket_address(name))


def receive_own(receiver: socket.socket, max_bytes: int) -> bytes | None:
    """Returns the next datagram, cut to `max_bytes`, or None if another user has sent it. Blocks or raises as
    `recv` does."""
    data, ancillary, _, _ = receiver.recvmsg(max_bytes, socket.CMSG_SPACE(_CREDENTIALS.size))
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            _, uid, _ = _CREDENTIALS.unpack(content)
            return data if uid == os.geteuid() else None
    return None
