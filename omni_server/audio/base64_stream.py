"""Base64 of a stream of bytes, in pieces that can be decoded one by one, or joined and decoded at once."""

import base64

_QUANTUM = 6
"""Three bytes become four base64 characters without padding, two bytes are one int16 sample: pieces of a
multiple of six bytes break neither, so a client may decode and play each piece by itself."""


class Base64Stream:
    """Encodes bytes as they come.

    The strings that `push` and `flush` return, joined, are the base64 of all bytes pushed. Only what `flush`
    returns may end in padding.
    """

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> str:
        """Base64 of as many bytes as make a multiple of six; "" where there are fewer than six so far."""
        pending = self._rest + data
        cut = len(pending) - len(pending) % _QUANTUM
        self._rest = pending[cut:]
        return base64.b64encode(pending[:cut]).decode("ascii")

    def flush(self) -> str:
        """Base64 of the up to five bytes that are left, padded; "" if there are none."""
        rest, self._rest = self._rest, b""
        return base64.b64encode(rest).decode("ascii")
