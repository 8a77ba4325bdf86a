"""What an engine reports to the server while it starts: one datagram per phase."""

import enum

import msgspec


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


def encode_report(report: PhaseReport) -> bytes:
    return msgspec.json.encode(report)


def decode_report(data: bytes) -> PhaseReport:
    """Raises `ValueError` if `data` is not a report."""
    return msgspec.json.decode(data, type=PhaseReport)
