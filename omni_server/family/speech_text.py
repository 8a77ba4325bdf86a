"""Text on its way to speech: what is spoken of it, and the rows that a stage reads it as."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class SpeechPrompt:
    """Prompt of a stage that reads text (`StageSpec.reads_text`), whose model composes all of its rows."""

    token_ids: tuple[int, ...]
    """One per row: codec tokens that are never sampled, so that no penalty for repetition applies to them."""
    rows: bytes
    """`omni_server.protocol.rows.ComposedSegment.data`"""
    text_ids: tuple[int, ...]
    """Ids of the rows that follow the prompt, one for each generated position, as far as they are known."""
    tail_ids: tuple[int, ...]
    """Ids of the rows that follow these, once the text is complete: each in turn, the last one forever."""


class SpeechText(Protocol):
    """The text that one request has spoken, on its way to the rows of the stage that reads it."""

    @property
    def token_texts(self) -> Sequence[str]:
        """What each token of the text so far spells."""
        ...

    def push(self, text: str) -> None: ...

    def flush(self) -> None:
        """What has been pushed is spoken as it is; the next text does not continue its last word."""
        ...

    def finish(self) -> None:
        """There is no more text."""
        ...

    @property
    def max_tokens(self) -> int:
        """The speech of the text so far has fewer."""
        ...

    def prompt(self) -> SpeechPrompt | None:
        """None while more text is needed, and if all of it has no tokens. Call it until there is one.

        Raises `InvalidRequestError`.
        """
        ...

    def take_ids(self) -> tuple[int, ...]:
        """The ids of rows that follow those of `prompt` and of earlier calls."""
        ...


class SpokenTextFilter(Protocol):
    """Leaves out what should not be spoken of one text, while it is written."""

    def push(self, text: str) -> str:
        """Returns what may be spoken now."""
        ...

    def finish(self) -> str:
        """Returns the rest."""
        ...


SpokenTextFilterFactory = Callable[[str], SpokenTextFilter]
"""The function of an edge with text. It takes the prompt that the text continues."""
