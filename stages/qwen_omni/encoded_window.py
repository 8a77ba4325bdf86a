"""How the metadata of a window travels to code2wav."""

from typing import Self

import msgspec


class EncodedWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Families derive their window from it."""

    def encode(self) -> bytes:
        """Returns MessagePack. Raises `OverflowError` for an integer beyond 64 bits."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """The inverse of `encode`. Raises `ValueError` for any other bytes."""
        try:
            return msgspec.msgpack.decode(payload, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"not a codec window: {error}") from error
