"""What our runner code needs to know about one step, whichever generation of vLLM's runner computes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from omni_server.protocol.corruption import Corruption
from omni_server.protocol.rows import RowsFeed

_Ints = npt.NDArray[np.signedinteger[Any]]


@dataclass(frozen=True)
class StepBatch:
    """The requests of one step, in the order of the flat batch."""

    request_ids: list[str]
    first_positions: _Ints  # [num_requests], position of the step's first token
    num_tokens: _Ints  # [num_requests]
    offsets: _Ints  # [num_requests], index of the first token in the flat batch, which has no gaps

    @property
    def total_tokens(self) -> int:
        return int(self.offsets[-1] + self.num_tokens[-1]) if len(self.offsets) else 0

    @property
    def is_decode(self) -> bool:
        """One token of each request, as in most steps."""
        return self.total_tokens == len(self.request_ids)


@dataclass(frozen=True)
class TakenSlot:
    """A slot of the output queue that the scheduler took for this step."""

    slot: int
    generation: int


@dataclass(frozen=True)
class StageStep:
    """What our scheduler adds to vLLM's `SchedulerOutput` for the workers."""

    slot: TakenSlot | None = None
    feeds: tuple[tuple[str, RowsFeed], ...] = field(default=())


_NOTHING = StageStep()
_ATTRIBUTE = "omni_stage_step"


def attach_step(scheduler_output: SchedulerOutput, step: StageStep) -> None:
    """Rides on the dataclass as an additional attribute: it is pickled with it where workers are processes."""
    vars(scheduler_output)[_ATTRIBUTE] = step


def attached_step(scheduler_output: SchedulerOutput) -> StageStep:
    """What the scheduler attached; nothing for the empty outputs that vLLM makes by itself."""
    step: StageStep = vars(scheduler_output).get(_ATTRIBUTE, _NOTHING)
    return step


_NO_FINDINGS: Mapping[str, Corruption] = {}
_FINDINGS_ATTRIBUTE = "omni_findings"


def attach_findings(output: ModelRunnerOutput, findings: Mapping[str, Corruption]) -> None:
    """What the worker found corrupt, by request. Rides on the dataclass as `StageStep` does, in the other direction."""
    vars(output)[_FINDINGS_ATTRIBUTE] = dict(findings)


def attached_findings(output: ModelRunnerOutput) -> Mapping[str, Corruption]:
    """What the worker attached; mostly nothing."""
    findings: Mapping[str, Corruption] = vars(output).get(_FINDINGS_ATTRIBUTE, _NO_FINDINGS)
    return findings
