"""What the speech of all requests shares: a clock, and who may use code2wav when."""

import time
from collections.abc import Callable

from omni_server.config.stage_config import ChunkPlan
from omni_server.family import CodecLayout
from omni_server.orchestrator.start_gate import StartGate
from omni_server.orchestrator.window_schedule import WindowSchedule
from omni_server.orchestrator.work_ahead import WorkAheadGate


class Pacer:
    """One for a server. `clock` gives seconds, from any origin."""

    def __init__(self, plan: ChunkPlan, layout: CodecLayout, clock: Callable[[], float] = time.monotonic) -> None:
        config = plan.pacing
        self.clock = clock
        self.max_outstanding_windows = plan.max_outstanding_windows
        self.gate = WorkAheadGate(config.max_work_ahead_s, clock)
        schedule = WindowSchedule(plan, layout) if plan.mode == "windows" else None
        self.start_gate = StartGate(schedule, config.max_start_delay_s, clock)
        self._origin = clock()

    def priority(self, due: float) -> int:
        """code2wav's priority of a window that is to be played at `due`: milliseconds since the server's start."""
        return round((due - self._origin) * 1000)
