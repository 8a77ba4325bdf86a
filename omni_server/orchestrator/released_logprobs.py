"""Log-probabilities of tokens whose text has been released."""

from collections import deque
from collections.abc import Sequence

from omni_server.types import SampledToken

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_CHARACTER_BYTES = 4


class ReleasedLogprobs:
    """Matches tokens to released text. Text lags behind its tokens while a character is incomplete, or while
    it could be the beginning of a stop string, whose tokens are not part of the answer."""

    def __init__(self) -> None:
        self._has_begun = False
        self._waiting: deque[SampledToken] = deque()
        self._position = 0  # bytes of text before the waiting tokens
        self._released = 0
        self._unread = bytearray()
        """Bytes of tokens whose text has not arrived."""

    def push(self, tokens: Sequence[SampledToken], text: str) -> tuple[SampledToken, ...]:
        """Adds tokens and the text released with them. Returns the tokens whose text is released."""
        if not (tokens or self._has_begun):  # always, if the request asks for none
            return ()
        self._has_begun = True
        self._waiting.extend(tokens)
        for token in tokens:
            self._unread += token.sampled.utf8
        num_read = self._num_bytes(text)
        del self._unread[:num_read]
        self._released += num_read
        out: list[SampledToken] = []
        while self._waiting and self._position + len(self._waiting[0].sampled.utf8) <= self._released:
            token = self._waiting.popleft()
            self._position += len(token.sampled.utf8)
            out.append(token)
        return tuple(out)

    def _num_bytes(self, text: str) -> int:
        """Returns the number of bytes that `text` was decoded from. A replacement character stands for
        itself or for invalid UTF-8: one for each run of bytes that could begin a character (Unicode 15,
        table 3-8)."""
        first, *others = text.split(_REPLACEMENT)
        position = len(first.encode())
        for piece in others:
            position += _num_invalid(bytes(self._unread[position : position + _MAX_CHARACTER_BYTES]))
            position += len(piece.encode())
        return position

    def rest(self) -> tuple[SampledToken, ...]:
        """Returns the waiting tokens, for an answer that no stop string has cut."""
        rest = tuple(self._waiting)
        self._waiting.clear()
        return rest


def _num_invalid(data: bytes) -> int:
    """Returns the number of bytes at the beginning of `data` that a decoder replaces, or the length of a
    replacement character that is there itself."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        if error.start == 0:
            return error.end
    return len(_REPLACEMENT.encode())
