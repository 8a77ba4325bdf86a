"""What an engine reports to the server while it starts: one datagram per phase."""

import enum

import msgspec


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
    """The server's socket; see `omni_server.protocol.local_socket`."""


class PhaseReport(msgspec.Struct, frozen=True):
    """One datagram, as JSON."""

    stage: str
    phase: Phase
    detail: str = ""
    """Text after the phase in the line that the user reads."""


def encode_report(report: PhaseReport) -> bytes:
    return msgspec.json.encode(report)


def decode_report(data: bytes) -> PhaseReport:
    """Raises `ValueError` if `data` is not a report."""
    return msgspec.json.decode(data, type=PhaseReport)
