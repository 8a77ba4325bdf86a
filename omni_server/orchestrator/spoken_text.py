"""Which text tokens may be spoken when stop strings can still cut the text."""

from collections.abc import Callable, Sequence

Detokenize = Callable[[Sequence[int]], str]

_INCOMPLETE = "\ufffd"
"""What a detokenizer puts for the first bytes of a character."""


class SpokenText:
    """Follows tokens and released text.

    With stop strings, text is released only once it can no longer be part of one; a token may be spoken when
    all of its text has been released. Without them every token may be spoken at once, and this class is not
    needed.
    """

    def __init__(self, detokenize: Detokenize) -> None:
        self._detokenize = detokenize
        self._token_ids: list[int] = []  # the last ones; what comes before them has been counted
        self._num_context = 0  # leading ones among them that have been counted, too
        self._counted = 0  # length of the text up to and including those
        self._ends: list[int] = []  # length of the text up to and including each token
        self._released = 0
        self._num_speakable = 0

    def push(self, token_ids: Sequence[int], text: str) -> None:
        """New tokens, and the text that was released with them."""
        for token_id in token_ids:
            self._token_ids.append(token_id)
            self._ends.append(self._length())
        self._released += len(text)
        while self._num_speakable < len(self._ends) and self._ends[self._num_speakable] <= self._released:
            self._num_speakable += 1

    def num_speakable(self) -> int:
        """Leading tokens whose text has been released."""
        return self._num_speakable

    def _length(self) -> int:
        """Of the text of all tokens so far. Decodes the last few only, as vLLM's incremental detokenizer
        does: behind a context of whole characters, because a token may read differently at the beginning of a
        text."""
        text = self._detokenize(self._token_ids)
        context = self._detokenize(self._token_ids[: self._num_context])
        length = self._counted + len(text) - len(context)
        if not text.endswith(_INCOMPLETE):
            del self._token_ids[: self._num_context]
            self._num_context = len(self._token_ids)
            self._counted = length
        return length
