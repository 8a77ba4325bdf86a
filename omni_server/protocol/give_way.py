"""How code2wav tells the language models on its GPU what it computes, so that they leave it room."""

import msgspec


class GiveWaySpec(msgspec.Struct, frozen=True):
    """Where a stage that gives way listens, and in what way it does."""

    socket: str
    """See `omni_server.protocol.local_socket`."""
    pauses: bool = True
    """It pauses for urgent batches."""
    busy_step_interval_s: float = 0.0
    """Its steps begin at least so far apart while batches are full."""


class BatchNotice(msgspec.Struct, frozen=True):
    """One datagram, as JSON: a batch begins, or has ended."""

    is_running: bool
    is_urgent: bool
    """Somebody waits for it."""
    is_full: bool
    """There is as much to do as fits into a batch, or nearly."""
    sent_at: float
    """`time.monotonic()`, which is one clock for all processes of a machine."""


_decoder = msgspec.json.Decoder(BatchNotice)


def encode_notice(message: BatchNotice) -> bytes:
    return msgspec.json.encode(message)


def decode_notice(data: bytes) -> BatchNotice:
    """Raises `ValueError` for anything else."""
    return _decoder.decode(data)
