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
    """One for a server."""

    def __init__(
        self,
        plan: ChunkPlan,
        layout: CodecLayout,
        *,
        max_step_codes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_step_codes`: codec tokens that a step of code2wav has room for. `clock` gives seconds, from
        any origin."""
        config = plan.pacing
        self.clock = clock
        self.max_outstanding_windows = plan.max_outstanding_windows
        self.gate = WorkAheadGate(config.max_work_ahead_s, clock)
        pace = TalkerPace(layout.frames_per_block)
        self.start_gate = StartGate(
            config.max_start_delay_s,
            clock,
            pace,
            max_step_codes=max_step_codes,
            max_ahead_s=config.max_work_ahead_s,
        )
        self._schedules: list[tuple[int, WindowSchedule]] = []  # from how many streams on, ascending
        if plan.mode == "windows":
            ramps = [(0, plan.new_blocks), *((busy.min_streams, busy.new_blocks) for busy in plan.busy)]
            self._schedules = [(least, WindowSchedule(plan, layout, ramp)) for least, ramp in ramps]
        self._origin = clock()

    @property
    def num_streams(self) -> int:
        """Utterances under way, but for those so far ahead of their listeners that they keep out of the
        others' way."""
        return self.start_gate.num_streams - self.gate.num_waiting

    def schedule(self) -> WindowSchedule | None:
        """For an utterance that is cut into its first window now; None where there are no windows before its
        end."""
        num_streams = self.num_streams
        return next((schedule for least, schedule in reversed(self._schedules) if num_streams >= least), None)

    def priority(self, due: float) -> int:
        """code2wav's priority of a window that is to be played at `due`: milliseconds since the server's
        start."""
        return round((due - self._origin) * 1000)
