"""Shared by a stage's scheduler and its workers: config, queue ends, and the data that they exchange in a
step, whichever vLLM runner computes it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from omni_server.protocol.corruption import Corruption
from omni_server.protocol.rows import AddressedFeed
from omni_server.protocol.runtime_config import QueueSpec, StageRuntimeConfig
from omni_server.transport.slab_queue import SlabQueue

_Ints = npt.NDArray[np.signedinteger[Any]]


@dataclass(frozen=True)
class StepBatch:
    """The requests of one step, in flat-batch order."""

    request_ids: list[str]
    first_positions: _Ints  # [num_requests], position of the step's first token
    num_tokens: _Ints  # [num_requests]
    offsets: _Ints  # [num_requests], index of the first token in the flat batch, which has no gaps

    @property
    def total_tokens(self) -> int:
        return int(self.offsets[-1] + self.num_tokens[-1]) if len(self.offsets) else 0

    def parts(self) -> Iterator[tuple[str, int, int, int]]:
        """Yields each request's id, first token position, number of tokens, and offset."""
        return zip(
            self.request_ids,
            self.first_positions.tolist(),
            self.num_tokens.tolist(),
            self.offsets.tolist(),
            strict=True,
        )


@dataclass(frozen=True)
class TakenSlot:
    """An output queue slot that the scheduler took for this step."""

    slot: int
    generation: int


@dataclass(frozen=True)
class StageStep:
    """What our scheduler adds to vLLM's `SchedulerOutput` for the workers."""

    slot: TakenSlot | None = None
    feeds: tuple[AddressedFeed, ...] = ()


# Both are added as attributes to vLLM's dataclasses, and are pickled with them if the workers are separate
# processes.
_STEP_ATTRIBUTE = "omni_stage_step"
_FINDINGS_ATTRIBUTE = "omni_findings"


def attach_step(scheduler_output: SchedulerOutput, step: StageStep) -> None:
    """Send `step` to the workers."""
    vars(scheduler_output)[_STEP_ATTRIBUTE] = step


def attached_step(scheduler_output: SchedulerOutput) -> StageStep:
    """The step that the scheduler attached, or an empty one for outputs that vLLM creates itself."""
    step: StageStep = vars(scheduler_output).get(_STEP_ATTRIBUTE, StageStep())
    return step


def attach_findings(output: ModelRunnerOutput, findings: Mapping[str, Corruption]) -> None:
    """Send the worker's findings, by request id, to the scheduler."""
    vars(output)[_FINDINGS_ATTRIBUTE] = dict(findings)


def attached_findings(output: ModelRunnerOutput) -> Mapping[str, Corruption]:
    """The worker's findings by request id, usually empty."""
    findings: Mapping[str, Corruption] = vars(output).get(_FINDINGS_ATTRIBUTE, {})
    return findings


def stage_config(vllm_config: VllmConfig) -> StageRuntimeConfig:
    """The server's config for this stage. Raises `TypeError` if the engine was started without one."""
    config = vllm_config.additional_config
    if not isinstance(config, StageRuntimeConfig):
        raise TypeError("an omni stage needs additional_config=StageRuntimeConfig(...)")
    return config


def open_queue(spec: QueueSpec | None) -> SlabQueue | None:
    """Map a queue. Returns None if there is none, or if rows are sent inline."""
    return None if spec is None or spec.path is None else SlabQueue(spec)


def open_queues(specs: Sequence[QueueSpec]) -> tuple[SlabQueue, ...]:
    """Map the queues of all replicas of the producer. Returns none if rows are sent inline."""
    return tuple(SlabQueue(spec) for spec in specs if spec.path is not None)
