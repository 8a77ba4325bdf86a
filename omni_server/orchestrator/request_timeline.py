"""Records when a request passed each stage."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from omni_server.types import StageTimes, WindowTimes


@dataclass
class _Stage:
    submitted_s: float
    first_output_s: float | None = None
    last_output_s: float | None = None
    ready_s: list[float] = field(default_factory=list)  # of each window
    sent_s: list[float] = field(default_factory=list)
    computed_s: list[float] = field(default_factory=list)

    def times(self, replica: int | None) -> StageTimes:
        windows = tuple(map(WindowTimes, self.ready_s, self.sent_s, self.computed_s))
        return StageTimes(self.submitted_s, self.first_output_s, self.last_output_s, windows, replica)


class RequestTimeline:
    """Timestamps by stage name, in seconds since the timeline was created."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.began = clock()
        """Clock time."""
        self._stages: dict[str, _Stage] = {}
        self._replicas: dict[str, int] = {}

    def mark_replica(self, stage: str, number: int) -> None:
        """The request is bound to this replica of a stage that has several."""
        self._replicas[stage] = number

    def mark_submitted(self, stage: str) -> None:
        """The stage has received the request. Only the first call counts."""
        if stage not in self._stages:
            self._stages[stage] = _Stage(self._now())

    def mark_output(self, stage: str) -> None:
        """The stage has returned a part of its output."""
        times, now = self._stages[stage], self._now()
        if times.first_output_s is None:
            times.first_output_s = now
        times.last_output_s = now

    def mark_window_ready(self, stage: str) -> None:
        """All codec tokens of the next window have arrived. The first window also marks the stage as
        submitted."""
        self.mark_submitted(stage)
        self._stages[stage].ready_s.append(self._now())

    def mark_window_sent(self, stage: str) -> None:
        """The next window has been sent."""
        self._stages[stage].sent_s.append(self._now())

    def mark_window_computed(self, stage: str) -> None:
        """The audio of the next window has been returned."""
        self._stages[stage].computed_s.append(self._now())

    def times(self) -> dict[str, StageTimes]:
        """Returns the times of the stages that received the request, in that order."""
        return {name: stage.times(self._replicas.get(name)) for name, stage in self._stages.items()}

    def _now(self) -> float:
        return self._clock() - self.began
