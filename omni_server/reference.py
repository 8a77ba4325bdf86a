"""What `omni-server verify` asks of a family's reference implementation."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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
    noise_seed: int
    """Seed of the decoder's noise, as the family's edge class gets it."""
    given_text: str | None
    """What was spoken word for word; None: the model wrote what was spoken."""
    text_ids: tuple[int, ...]
    codes: tuple[int, ...]  # T
    max_text_tokens: int
    max_codes: int
    repetition_penalties: Mapping[str, float]
    """By autoregressive stage, under the family's name for it. Everything else is greedy."""


@dataclass(frozen=True)
class ReferenceAnswer:
    prompt_tokens: int
    text: tuple[Difference, ...]
    """Empty for a given text."""
    given_ids: tuple[int, ...] | None
    """Tokens of the given text."""
    codes: tuple[Difference, ...]
    waveform: npt.NDArray[np.float32]
    """[num_samples] of the same codes and noise, at the decoder's rate; of length 0 where there are none."""


class Reference(Protocol):
    """One checkpoint, loaded by another implementation of the model."""

    def answer(self, job: ReferenceJob) -> ReferenceAnswer:
        """Lead a greedy generation along the tokens of `job`. May raise anything; the message is reported."""
        ...


class ReferenceFactory(Protocol):
    """`ModelFamily.reference` names one. It is called in a process of its own."""

    def __call__(self, folder: Path, *, device: str, dtype: str) -> Reference:
        """`device` as torch calls it, as in cuda:0; `dtype` is that of the autoregressive stages, all others
        compute in float32."""
        ...
