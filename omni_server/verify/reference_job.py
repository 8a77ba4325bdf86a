"""What the reference is asked, and what it answers."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omni_server.types import ChatMessage


@dataclass(frozen=True)
class Difference:
    """A step at which the reference prefers another token. Logits are its own, after its penalties."""

    index: int
    ours: int
    reference: int
    margin: float
    """Logit of the reference's token less that of ours; 0 or more."""
    largest: float
    """The largest absolute logit of the step, by which rounding is judged."""


@dataclass(frozen=True)
class ReferenceJob:
    """An answer of this server, and what it was the answer to. T: codec tokens."""

    messages: tuple[ChatMessage, ...]
    voice: str | None
    """None: only the text is compared."""
    given_text: str | None
    """What was spoken word for word; None: the thinker wrote what was spoken."""
    text_ids: tuple[int, ...]
    codes: tuple[int, ...]  # T
    max_text_tokens: int
    max_codes: int
    talker_penalty: float


@dataclass(frozen=True)
class ReferenceAnswer:
    prompt_tokens: int
    text: tuple[Difference, ...]
    """Empty for a given text."""
    given_ids: tuple[int, ...] | None
    """Tokens of the given text."""
    codes: tuple[Difference, ...]
    waveform: npt.NDArray[np.float32]
    """[480 T] of the same codes and noise; of length 0 where there are none."""
