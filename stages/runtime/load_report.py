"""How full a stage is, told to the server with messages that are sent anyway.

vLLM's own statistics (`log_stats`) would add a message to every step that has no output, which the blocks of tokens
are there to save, and a record for each token in the process that all requests share.
"""

import time
from collections.abc import Callable

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats

INTERVAL_S = 0.25
"""Between two reports while the stage is busy. When it falls idle there is one at once."""


class LoadReport:
    """Belongs to one scheduler."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due = clock()
        self._was_idle = True

    def attach(self, scheduler: Scheduler, outputs: dict[int, EngineCoreOutputs]) -> None:
        """To be called after each step, with its messages to the server. Those that hold statistics already keep
        them."""
        if any(group.scheduler_stats is not None for group in outputs.values()):
            return
        num_running, num_waiting = scheduler.get_request_counts()
        is_idle = num_running == num_waiting == 0
        now = self._clock()
        # A stage that falls idle sends no message for a while that could tell it later.
        if self._was_idle if is_idle else (not outputs or now < self._due):
            return
        self._due = now + INTERVAL_S
        self._was_idle = is_idle
        message = next(iter(outputs.values()), None)
        if message is None:
            message = outputs[0] = EngineCoreOutputs()
        message.scheduler_stats = SchedulerStats(
            num_running_reqs=num_running,
            num_waiting_reqs=num_waiting,
            kv_cache_usage=scheduler.get_kv_cache_usage(),
        )
