"""How code2wav asks stages of low priority on its GPU to pause while it computes what a user waits for."""

import msgspec


class GiveWaySpec(msgspec.Struct, frozen=True):
    """Where a stage that gives way listens."""

    socket: str
    """See `omni_server.protocol.local_socket`."""


class UrgentBatch(msgspec.Struct, frozen=True):
    """One datagram, as JSON: an urgent batch begins, or has ended."""

    is_running: bool
    sent_at: float
    """`time.monotonic()`, which is one clock for all processes of a machine."""


_decoder = msgspec.json.Decoder(UrgentBatch)


def encode_urgent_batch(message: UrgentBatch) -> bytes:
    return msgspec.json.encode(message)


def decode_urgent_batch(data: bytes) -> UrgentBatch:
    """Raises `ValueError` for anything else."""
    return _decoder.decode(data)
