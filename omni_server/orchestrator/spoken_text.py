"""Which of the thinker's tokens may be spoken when stop strings can still cut the text."""

from collections.abc import Callable, Sequence

Detokenize = Callable[[Sequence[int]], str]


class SpokenText:
    """Follows tokens and released text.

    With stop strings, text is released only once it can no longer be part of one; a token may be spoken when all
    of its text has been released. Without them every token may be spoken at once, and this class is not needed.
    """

    def __init__(self, detokenize: Detokenize) -> None:
        self._detokenize = detokenize
        self._token_ids: list[int] = []
        self._ends: list[int] = []  # length of the text up to and including each token
        self._released = 0

    def push(self, token_ids: Sequence[int], text: str) -> None:
        """New tokens, and the text that was released with them."""
        for token_id in token_ids:
            self._token_ids.append(token_id)
            self._ends.append(len(self._detokenize(self._token_ids)))
        self._released += len(text)

    def num_speakable(self) -> int:
        """Leading tokens whose text has been released."""
        count = 0
        for end in self._ends:
            if end > self._released:
                break
            count += 1
        return count
