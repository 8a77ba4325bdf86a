"""How a diffusion stage tells the autoregressive stages on its GPU what it computes, so that they leave it
room."""

import msgspec


class GiveWaySpec(msgspec.Struct, frozen=True):
    """Where a stage that gives way listens, and in what way it does."""

    socket: str
    """See `omni_server.protocol.local_socket`."""
    pauses: bool = True
    """It pauses for urgent batches."""
    step_interval_per_stream_s: float = 0.0
    """Its steps begin at least so far apart for each utterance that is under way, while batches are
    computed."""
    max_streams: int = 1
    """It works for no more than so many at once."""


class BatchNotice(msgspec.Struct, frozen=True, kw_only=True):
    """One datagram, as JSON: a batch begins, or has ended."""

    is_running: bool
    is_urgent: bool
    """Somebody waits for it."""
    num_streams: int
    """Utterances that need the announcing stage."""
    sent_at: float
    """`time.monotonic()`, which is one clock for all processes of a machine."""


_decoder = msgspec.json.Decoder(BatchNotice)


def encode_notice(message: BatchNotice) -> bytes:
    return msgspec.json.encode(message)


def decode_notice(data: bytes) -> BatchNotice:
    """Raises `ValueError` for anything else."""
    return _decoder.decode(data)
