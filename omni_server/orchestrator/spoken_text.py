"""Determines which text tokens may be spoken while stop strings can still cut the text."""

from collections.abc import Callable, Sequence

Detokenize = Callable[[Sequence[int]], str]

_INCOMPLETE = "\ufffd"
"""What a detokenizer emits for an incomplete character."""


class SpokenText:
    """Tracks tokens and released text.

    With stop strings, text is released only once it can no longer be part of one. A token may be spoken when
    all of its text has been released. Without stop strings every token may be spoken immediately, and this
    class is not needed.
    """

    def __init__(self, detokenize: Detokenize) -> None:
        self._detokenize = detokenize
        self._token_ids: list[int] = []  # the most recent tokens; earlier ones have been counted
        self._num_context = 0  # leading tokens of these that have been counted, too
        self._counted = 0  # length of the text up to and including those
        self._ends: list[int] = []  # length of the text up to and including each token
        self._released_length = 0
        self._num_released = 0

    def push(self, token_ids: Sequence[int], text: str) -> None:
        """Adds new tokens and the text released with them."""
        for token_id in token_ids:
            self._token_ids.append(token_id)
            self._ends.append(self._length())
        self._released_length += len(text)
        while (
            self._num_released < len(self._ends) and self._ends[self._num_released] <= self._released_length
        ):
            self._num_released += 1

    def num_released(self) -> int:
        """Returns the number of leading tokens whose text has been released."""
        return self._num_released

    def _length(self) -> int:
        """Returns the length of the text of all tokens so far. Decodes only the last few, as vLLM's
        incremental detokenizer does, after a context of whole characters, because a token may decode
        differently at the beginning of a text."""
        text = self._detokenize(self._token_ids)
        context = self._detokenize(self._token_ids[: self._num_context])
        length = self._counted + len(text) - len(context)
        if not text.endswith(_INCOMPLETE):
            del self._token_ids[: self._num_context]
            self._num_context = len(self._token_ids)
            self._counted = length
        return length
