"""A scheduler that lets requests which come at the same moment into the same step.

The autoregressive stage before decodes all its requests in one step, and so they all complete their parts at the same
moment. They arrive one after the other, about half a millisecond apart. Without a pause the first of them would be
computed alone, and the others after it: a step of one window takes 38 ms, one of four windows 48 ms.
"""

import time
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

PAUSE_S = 0.001
"""After each arrival. vLLM's engine sleeps for as long where a step has nothing to compute, then looks for arrivals."""
LONGEST_PAUSE_S = 0.006
BUSY_S = 0.0005
"""What arrives so soon after a step has waited for it to end, and its companions are there."""


class JointBatchScheduler(Scheduler):
    """vLLM's, with a pause before the first step after the stage was idle."""

    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step_ended_at = -1.0
        self._first_at = -1.0
        self._starts_at = -1.0

    def add_request(self, request: Request) -> None:
        now = self.clock()
        if not self.has_unfinished_requests():
            self._first_at = now
        if now > self._step_ended_at + BUSY_S:
            self._starts_at = min(now + PAUSE_S, self._first_at + LONGEST_PAUSE_S)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self.has_unfinished_requests() and self.clock() < self._starts_at:
            return SchedulerOutput.make_empty()
        return super().schedule(*args, **kwargs)

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            self._step_ended_at = self.clock()
        return outputs
