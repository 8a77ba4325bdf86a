"""Base64 of a byte stream, in pieces that can be decoded one by one, or joined and decoded together."""

import base64

_QUANTUM = 6
"""Three bytes become four base64 characters without padding, two bytes are one int16 sample: pieces of a
multiple of six bytes split neither, so a client may decode and play each piece by itself."""


class Base64Stream:
    """Encodes bytes as they arrive.

    The joined strings from `push` and `flush` are the base64 of all bytes pushed. Only the result of `flush`
    may end in padding.
    """

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> str:
        """Returns base64 of the pending bytes up to a multiple of six; "" if there are fewer than six."""
        pending = self._rest + data
        cut = len(pending) - len(pending) % _QUANTUM
        self._rest = pending[cut:]
        return base64.b64encode(pending[:cut]).decode("ascii")

    def flush(self) -> str:
        """Returns padded base64 of the remaining bytes, at most five; "" if there are none."""
        rest, self._rest = self._rest, b""
        return base64.b64encode(rest).decode("ascii")
