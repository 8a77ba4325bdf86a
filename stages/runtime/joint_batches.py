"""Requests that come at the same moment go into the same step of a stage that was idle.

They arrive one after the other, about a millisecond apart, and without a pause the first of them would be computed
alone. For code2wav that is a step more, and the steps of one and of four windows take 38 and 45 ms. Prompts that go
through the thinker together stay together: their texts, their speech and their windows come at the same moments. Once
they are torn apart they stay apart, and four callers wait a quarter longer for their speech.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from omni_server.protocol.diffusion import STREAMS_KEY

BUSY_S = 0.0005
"""What arrives so soon after a step has waited for it to end, and its companions are there."""
WINDOW_PAUSE_S, LONGEST_WINDOW_PAUSE_S = 0.001, 0.006


class Arrivals:
    """When the first step after a time without work may begin.

    While it may not, a scheduler makes a step `without_tokens`: vLLM's engine then sleeps for a millisecond and looks
    for what has arrived."""

    def __init__(
        self,
        pause_s: float,
        longest_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pause_s` after each arrival, `longest_s` after the first."""
        self._pause_s = pause_s
        self._longest_s = longest_s
        self._clock = clock
        self._step_ended_at = self._first_at = self._starts_at = float("-inf")

    def arrived(self, *, is_idle: bool) -> None:
        """A request has come that others may come with; `is_idle`: there was none before it."""
        now = self._clock()
        if is_idle:
            self._first_at = now
        if now > self._step_ended_at + BUSY_S:
            self._starts_at = min(now + self._pause_s, self._first_at + self._longest_s)

    def step_ended(self) -> None:
        self._step_ended_at = self._clock()

    @property
    def is_pausing(self) -> bool:
        return self._clock() < self._starts_at


@contextmanager
def without_tokens(scheduler: Scheduler) -> Iterator[None]:
    """What vLLM's `scheduler` makes meanwhile has no tokens of any request, but all else that workers and connectors
    of the KV cache are told in each step."""
    limit, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, 0
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = limit


class JointBatchScheduler(Scheduler):
    """vLLM's, for stages whose requests are computed in one step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.arrivals = Arrivals(WINDOW_PAUSE_S, LONGEST_WINDOW_PAUSE_S)

    def add_request(self, request: Request) -> None:
        extra = {} if request.pooling_params is None else request.pooling_params.extra_kwargs or {}
        if extra.get(STREAMS_KEY) != 1:  # else nobody else could come at the same moment
            self.arrivals.arrived(is_idle=not self.has_unfinished_requests())
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self.arrivals.is_pausing:
            with without_tokens(self):
                return super().schedule(*args, **kwargs)
        return super().schedule(*args, **kwargs)

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            self.arrivals.step_ended()
        return outputs
