"""What the speech of all requests shares: a clock, and who may use code2wav when."""

import time
from collections.abc import Callable

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.family import CodecLayout
from omni_server.orchestrator.start_gate import StartGate
from omni_server.orchestrator.talker_pace import TalkerPace
from omni_server.orchestrator.window_schedule import WindowSchedule
from omni_server.orchestrator.work_ahead import WorkAheadGate


class Pacer:
    """One for a server. `clock` gives seconds, from any origin."""

    def __init__(self, plan: ChunkPlan, layout: CodecLayout, clock: Callable[[], float] = time.monotonic) -> None:
        config = plan.pacing
        self.clock = clock
        self.max_outstanding_windows = plan.max_outstanding_windows
        self.gate = WorkAheadGate(config.max_work_ahead_s, clock)
        self.start_gate = StartGate(config.max_start_delay_s, clock, TalkerPace(layout.codes_per_block))
        self._usual: WindowSchedule | None = None
        self._busy: WindowSchedule | None = None
        self._min_busy_streams = 0
        if plan.mode == "windows":
            self._usual = WindowSchedule(plan, layout, plan.new_blocks)
            if plan.busy is not None:
                self._busy = WindowSchedule(plan, layout, plan.busy.new_blocks)
                self._min_busy_streams = plan.busy.min_streams
        self._origin = clock()

    def schedule(self) -> WindowSchedule | None:
        """For an utterance that is cut into its first window now; None where there are no windows before its end."""
        if self._busy is not None and self.start_gate.num_streams >= self._min_busy_streams:
            return self._busy
        return self._usual

    def priority(self, due: float) -> int:
        """code2wav's priority of a window that is to be played at `due`: milliseconds since the server's start."""
        return round((due - self._origin) * 1000)
