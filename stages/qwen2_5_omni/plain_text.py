"""Callers' text among what the chat template writes: it may spell special tokens, and must not become
them."""

import secrets
from collections.abc import Iterable


class PlainText:
    """For one prompt. What is marked before it is rendered can be cut afterwards, so that the tokenizer never
    sees all of a token that a caller has spelled."""

    def __init__(self, tokens: Iterable[str]) -> None:
        """`tokens`: those that the tokenizer finds in text before anything else."""
        self._tokens = [token for token in tokens if len(token) > 1]
        # Nobody can have sent it. Letters and digits only: JSON leaves it as it is.
        self._mark = secrets.token_hex(16)

    def marked(self, text: str) -> str:
        """With a mark behind the first character of every token in it."""
        for token in self._tokens:
            while token in text:  # again only for one that overlaps itself
                text = text.replace(token, token[0] + self._mark + token[1:])
        return text

    def pieces(self, rendered: str) -> tuple[str, ...]:
        """`rendered`, without the marks, cut at them."""
        return tuple(rendered.split(self._mark))
