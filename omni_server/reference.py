"""The interface between `omni-server verify` and a family's reference implementation."""

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
    """Logit of the reference's token minus the logit of our token; at least 0."""
    largest: float
    """The largest absolute logit of the step, relative to which rounding is judged."""


@dataclass(frozen=True)
class ReferenceJob:
    """An answer of this server, and the request that it answers. T is the number of codec tokens."""

    messages: tuple[ChatMessage, ...]
    voice: str | None
    """None: only the text is compared."""
    noise_seed: int
    """Seed of the decoder's noise, as the family's edge class gets it."""
    given_text: str | None
    """The text that was read word for word; None: the model generated the text."""
    text_ids: tuple[int, ...]
    codes: tuple[int, ...]  # T
    max_text_tokens: int
    max_codes: int
    repetition_penalties: Mapping[str, float]
    """For each autoregressive stage, by the family's name for it. Sampling is greedy otherwise."""


@dataclass(frozen=True)
class ReferenceAnswer:
    prompt_tokens: int
    text: tuple[Difference, ...]
    """Empty for a given text."""
    given_ids: tuple[int, ...] | None
    """Tokens of the given text."""
    codes: tuple[Difference, ...]
    waveform: npt.NDArray[np.float32]
    """[num_samples], from the same codes and noise, at the decoder's rate; empty if there are no codes."""


class Reference(Protocol):
    """One checkpoint, loaded by another implementation of the model."""

    def answer(self, job: ReferenceJob) -> ReferenceAnswer:
        """Generate greedily, teacher-forced with the tokens of `job`. The message of any exception is
        reported."""
        ...


class ReferenceFactory(Protocol):
    """The object that `ModelFamily.reference` names. It is called in a separate process."""

    def __call__(self, folder: Path, *, device: str, dtype: str) -> Reference:
        """`device` is torch's name, such as cuda:0. `dtype` is that of the autoregressive stages; all other
        stages compute in float32."""
        ...
