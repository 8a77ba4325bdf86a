"""What an engine reports to the server while it starts: one datagram per phase.

The server's socket is in Linux's abstract namespace: it is not in the file system, and ends with its owner,
however that ends. It has no permissions either: any process in the network namespace can find it in
/proc/net/unix and send to it. The kernel is therefore asked for the sender of each datagram, and datagrams of
other users are dropped.
"""

import enum
import os
import secrets
import socket
import struct
from contextlib import suppress

import msgspec

_MAX_REPORT_BYTES = 4096
_CREDENTIALS = struct.Struct("=iII")
"""`struct ucred`: pid, uid, gid; see unix(7)."""


class Phase(enum.Enum):
    """Phases of a start, in order. The value is the text that the user reads."""

    LOADING = "loading weights"
    LOADED = "weights loaded"
    MEASURING = "measuring memory"
    COMPILING = "compiling"
    """Also measures memory: the first pass does both. A start that finds compiled code in the cache uses
    it."""
    BUDGETED = "memory budget"
    CAPTURING = "capturing CUDA graphs"


class ProgressSpec(msgspec.Struct, frozen=True):
    """Where an engine reports, and under which name."""

    stage: str
    socket: str
    """The name of the server's socket."""


class PhaseReport(msgspec.Struct, frozen=True):
    """One datagram, as JSON."""

    stage: str
    phase: Phase
    detail: str = ""
    """Text after the phase in the line that the user reads."""


def new_socket_name() -> str:
    """Returns a name that is unique on this machine, without the leading zero byte, so that it can be sent as
    text."""
    return f"omni-server-{secrets.token_hex(8)}"


def socket_address(name: str) -> str:
    return f"\0{name}"


def bound_socket(name: str) -> socket.socket:
    """Returns a new socket that receives under this name, and does not block."""
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    receiver.bind(socket_address(name))
    return receiver


def send_report(report: PhaseReport, name: str) -> None:
    """Never blocks and never fails: the report is lost if there is no listener, or if its socket is full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender, suppress(OSError):
        sender.sendto(msgspec.json.encode(report), socket_address(name))


def receive_report(receiver: socket.socket) -> PhaseReport | None:
    """Returns what the next datagram reports; None if another user has sent it, or it is no report. Raises
    `BlockingIOError` if there is none."""
    data, ancillary, _, _ = receiver.recvmsg(_MAX_REPORT_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
    users = [
        _CREDENTIALS.unpack(content)[1] for _, kind, content in ancillary if kind == socket.SCM_CREDENTIALS
    ]
    if users != [os.geteuid()]:
        return None
    with suppress(ValueError):  # any process of this user can send to the socket
        return msgspec.json.decode(data, type=PhaseReport)
    return None
