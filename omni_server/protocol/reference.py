"""The interface between `omni-server verify` and a family's reference implementation."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from omni_server.types import ChatMessage, ClonedVoice


@dataclass(frozen=True)
class Difference:
    """A step where the reference prefers another token. Logits are the reference's, after penalties."""

    index: int
    ours: int
    reference: int
    margin: float
    """Logit of the reference's token minus the logit of our token; at least 0."""
    largest: float
    """The step's largest absolute logit, the scale for judging rounding."""


@dataclass(frozen=True)
class ReferenceJob:
    """An answer of this server, and its request. T is the number of codec tokens: those of the first frame,
    one per codebook, then those of the second, and so on."""

    messages: tuple[ChatMessage, ...]
    voice: str | None
    """None to compare the text only."""
    noise_seed: int
    """Seed of the decoder's noise, as passed to the family's edge class."""
    given_text: str | None
    """The text that was read word for word; None if the model generated it."""
    clone: ClonedVoice | None
    """The voice, for models that clone one. It has a vector only."""
    text_ids: tuple[int, ...]
    codes: tuple[int, ...]  # T
    max_text_tokens: int
    max_codes: int
    """Most tokens that the talker may sample; one per frame if it predicts the others."""
    repetition_penalties: Mapping[str, float]
    """By the family's names of autoregressive stages. Sampling is otherwise greedy."""


@dataclass(frozen=True)
class ReferenceAnswer:
    prompt_tokens: int
    text: tuple[Difference, ...]
    """Empty for a given text."""
    given_ids: tuple[int, ...] | None
    """Tokens of the given text; empty if they are part of the prompt."""
    codes: tuple[Difference, ...]
    """Indices are those of `ReferenceJob.codes`."""
    waveform: npt.NDArray[np.float32]
    """[num_samples], from the same codes and noise, at the decoder's rate; empty without codes."""


class Reference(Protocol):
    """One checkpoint, loaded by another implementation of the model."""

    def answer(self, job: ReferenceJob) -> ReferenceAnswer:
        """Generate greedily, teacher-forced with the tokens of `job`. Exceptions' messages are reported."""
        ...


class ReferenceFactory(Protocol):
    """The object that `ModelFamily.reference` names, called in a separate process."""

    def __call__(self, folder: Path, *, device: str, dtype: str) -> Reference:
        """`device` is torch's name, such as cuda:0. `dtype` applies to autoregressive stages; all others
        compute in float32."""
        ...
