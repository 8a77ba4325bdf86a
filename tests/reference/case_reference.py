"""The reference that `omni-server verify` uses, generating freely, and watched while it does."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Generic, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import TypeVar

from stages.qwen_omni.forced_reference import ForcedReference
from tests.reference.cases import Case
from tests.reference.shared_answers import SharedAnswers


class Result(Protocol):
    """What the answers of all families have."""

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...

    @property
    def text_ids(self) -> tuple[int, ...]:
        """The stop token included."""
        ...

    @property
    def codes(self) -> tuple[int, ...]: ...

    @property
    def waveform(self) -> npt.NDArray[np.float32]: ...


ResultT = TypeVar("ResultT", bound=Result, covariant=True, default=Result)


class CaseReference(ForcedReference, Generic[ResultT]):
    """One loaded checkpoint, in float32 on the CPU. Sets torch to one thread: these models are too small for
    more. Greedy, with the reference's own repetition penalty of 1.05 in the talker."""

    def __init__(self, model_dir: Path, answer_folder: Path | None = None) -> None:
        """`answer_folder`: see `SharedAnswers`."""
        torch.set_num_threads(1)
        self._answers = SharedAnswers(model_dir, answer_folder)
        super().__init__(model_dir, device="cpu", dtype="float32")

    @abstractmethod
    def generated(self, case: Case, text: dict[str, object]) -> ResultT:
        """`text`: arguments for the thinker's `generate`."""

    @torch.inference_mode()
    def run(self, case: Case) -> ResultT:
        stop_ids = [*self.stop_ids(case), *(() if case.ignore_eos else self.text_ends)]
        text: dict[str, object] = {
            "max_new_tokens": case.thinker_max_tokens,
            "eos_token_id": stop_ids or [-1],  # an empty list is refused; -1 is no token
            "do_sample": False,
        }
        return self.generated(case, text)

    def answer_of(self, case: Case) -> ResultT:
        """As `run`, but computed once in a test run."""
        return self._answers.get(case, lambda: self.run(case))

    def answers_of(self, cases: Mapping[str, Case]) -> dict[str, ResultT]:
        return self._answers.get_all(cases, self.run)

    def stop_ids(self, case: Case) -> tuple[int, ...]:
        """The case's additional stop tokens on this checkpoint."""
        if case.stop_at is None:
            return ()
        text = self.answer_of(replace(case, stop_at=None, talker_max_tokens=1)).text_ids
        return (text[min(case.stop_at, len(text) - 1)],)


def min_top2_gap(scores: tuple[torch.Tensor, ...]) -> float:
    """Smallest distance of the best from the second best processed logit."""
    return min(float(-cast(torch.Tensor, score[0].topk(2).values).diff()) for score in scores)
