"""What an engine reports while it starts: one datagram at each step, to whoever listens in the server."""

import contextlib
import enum
import socket

import msgspec

from omni_server.protocol.local_socket import socket_address


class Phase(enum.Enum):
    """Steps of a start, in their order; the value is what a user reads."""

    LOADING = "loading weights"
    LOADED = "weights loaded"
    MEASURING = "measuring memory"
    COMPILING = "compiling"
    """And measuring memory: the first pass does both. A start that finds compiled code in the cache takes
    it."""
    BUDGETED = "memory budget"
    CAPTURING = "capturing CUDA graphs"


class ProgressSpec(msgspec.Struct, frozen=True):
    """Where an engine reports, and as whom."""

    stage: str
    socket: str
    """The server's; see `omni_server.protocol.local_socket`."""


class PhaseReport(msgspec.Struct, frozen=True):
    """One datagram, as JSON."""

    stage: str
    phase: Phase
    detail: str = ""
    """What follows the phase in the line that the user reads."""


def decode_report(data: bytes) -> PhaseReport:
    """Raises `ValueError` if `data` is not a report."""
    return msgspec.json.decode(data, type=PhaseReport)


class ProgressReporter:
    """The engine's end, made in its worker. Without a `spec` (an engine that nobody watches) it sends
    nothing."""

    def __init__(self, spec: ProgressSpec | None) -> None:
        self._spec = spec

    def report(self, phase: Phase, detail: str = "") -> None:
        """Never blocks and never fails: a start does not depend on being watched."""
        if self._spec is None:
            return
        message = msgspec.json.encode(PhaseReport(self._spec.stage, phase, detail))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            # If the server has stopped listening, or does not keep up, the next report tells more than this
            # one.
            with contextlib.suppress(OSError):
                sender.sendto(message, socket_address(self._spec.socket))
