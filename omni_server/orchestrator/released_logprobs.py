"""Log-probabilities of the tokens whose text has been released."""

from collections import deque
from collections.abc import Sequence

from omni_server.types import SampledToken


class ReleasedLogprobs:
    """Follows tokens and released text: text lags behind its tokens while a character is incomplete, or while it may
    be the beginning of a stop string, whose tokens are no part of the answer."""

    def __init__(self) -> None:
        self._waiting: deque[SampledToken] = deque()
        self._position = 0  # bytes of text before those that wait
        self._released = 0

    def push(self, tokens: Sequence[SampledToken], text: str) -> tuple[SampledToken, ...]:
        """New tokens, and the text that was released with them; returns those whose text is out."""
        self._waiting.extend(tokens)
        self._released += len(text.encode())
        out: list[SampledToken] = []
        while self._waiting and self._position + len(self._waiting[0].sampled.utf8) <= self._released:
            token = self._waiting.popleft()
            self._position += len(token.sampled.utf8)
            out.append(token)
        return tuple(out)

    def rest(self) -> tuple[SampledToken, ...]:
        """Those that wait; for an answer that no stop string has cut."""
        rest = tuple(self._waiting)
        self._waiting.clear()
        return rest
