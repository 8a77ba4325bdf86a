"""When code2wav will have computed the next windows of each stream, step by step."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from omni_server.orchestrator.step_times import SAME_STEP_S, StepTimes
from omni_server.orchestrator.window_schedule import WindowSchedule

FIRST_DUE_S = 1.0
"""The first window of an utterance is due so long after it is sent. Nobody hears a stall yet: who is being
played and needs a window earlier than that goes first. Where code2wav keeps up, nothing waits for anything
else."""

NUM_AHEAD = 4
"""Windows of a stream that are looked at before it starts. Those behind have had time to become early or
late."""

MAX_STEPS = 200
"""It stops after so many. They are seconds; but while nothing is known of how long one takes, time stands
still."""


class Stream(Protocol):
    """What is known of an utterance's windows (`Playback`)."""

    @property
    def schedule(self) -> WindowSchedule | None: ...

    @property
    def started_at(self) -> float | None: ...

    @property
    def next_window(self) -> int: ...

    @property
    def is_waiting(self) -> bool: ...

    @property
    def sent_at(self) -> float: ...

    @property
    def sent_due(self) -> float: ...

    def has_window(self, number: int) -> bool: ...

    def expected_codes_at(self, needed: int) -> float: ...


@dataclass(slots=True, eq=False)
class _Course:
    """A stream as it goes on: its next window, and how late those before it were."""

    stream: Stream
    schedule: WindowSchedule
    number: int
    start: float | None  # when it is played from; None before its first window has come back
    num_left: int  # windows that are still to be looked at
    due: float = 0.0
    late_s: float = float("-inf")

    @property
    def has_next(self) -> bool:
        return self.stream.has_window(self.number)

    def next_ready(self, now: float, max_ahead_s: float) -> float:
        """When code2wav gets the next window, not before `now`; from then on it is known when that is due."""
        ready = max(now, self.stream.expected_codes_at(self.schedule.needed_codes(self.number)))
        if self.start is None:
            self.due = ready + FIRST_DUE_S
            return ready
        self.due = self.start + self.schedule.start_s(self.number)
        return max(ready, self.due - max_ahead_s)

    def comes_back(self, now: float) -> None:
        """The next window, now."""
        if self.start is None:
            self.start = now
        elif self.num_left:
            self.num_left -= 1
            self.late_s = max(self.late_s, now - self.start - self.schedule.start_s(self.number))
        self.number += 1


class Forecast:
    """Goes on from this moment as code2wav will: each step takes the waiting windows that are due first, as
    many as there is room for, and each stream sends its next window when the one before it has come back, the
    talker has made the codes, and the stream is not too far ahead of its listener. That is so where state is
    carried and among many; elsewhere windows may come earlier than here. Streams of which nothing has come
    yet are not in it.
    """

    def __init__(
        self,
        streams: Iterable[Stream],
        held: Collection[Stream],
        steps: StepTimes,
        *,
        now: float,
        max_step_codes: int,
        max_ahead_s: float | None,
        horizon: float,
    ) -> None:
        """`held`: those of `streams` that could start. All of them are taken to start `now`.
        `max_step_codes`: what code2wav's steps have room for, context included, in any number of windows.
        Where many speak, no window is sent more than `max_ahead_s` before it is due (`WorkAheadGate`). It
        goes on until `horizon` at the latest."""
        self._steps = steps
        self._max_step_codes = max_step_codes
        self._max_ahead_s = float("inf") if max_ahead_s is None else max_ahead_s
        self._num_added = 0  # of windows that are due at the same time, the first come first
        self._coming: list[tuple[float, int, _Course]] = []  # by when they are ready
        self._queue: list[tuple[float, int, _Course]] = []  # by when they are due
        self._courses: dict[Stream, _Course] = {}
        inside: list[_Course] = []
        for stream in streams:
            if stream.schedule is None:
                continue
            is_held = stream in held
            start = now if is_held else stream.started_at
            course = _Course(stream, stream.schedule, stream.next_window, start, NUM_AHEAD if is_held else 0)
            if is_held:
                self._courses[stream] = course
            if stream.is_waiting:
                course.due = stream.sent_due
                inside.append(course)
            else:
                self._goes_on(course, now)
        self._go_on(inside, now, horizon)

    def late_s(self, stream: Stream) -> float:
        """By how much the latest of the next windows of one that is held would come too late if it started
        now; negative if they come early, minus infinity if there are none."""
        course = self._courses.get(stream)
        return float("-inf") if course is None else course.late_s

    def _go_on(self, inside: list[_Course], now: float, horizon: float) -> None:
        batch, time = self._running_step(inside, now)
        is_looked_at = {course for course in self._courses.values() if course.has_next}
        for _ in range(MAX_STEPS):
            for course in batch:
                course.comes_back(time)
                self._goes_on(course, time)
                if not course.num_left or not course.has_next:
                    is_looked_at.discard(course)
            if not is_looked_at or time >= horizon:
                break
            if not self._queue:  # there is something, or nothing would be left to be looked at
                time = max(time, self._coming[0][0])
            while self._coming and self._coming[0][0] <= time:
                self._push(heappop(self._coming)[2])
            batch, seconds = self._next_step()
            time += seconds
        for course in is_looked_at:  # no earlier than that
            assert course.start is not None
            course.late_s = max(course.late_s, time - course.start - course.schedule.start_s(course.number))

    def _running_step(self, inside: list[_Course], now: float) -> tuple[list[_Course], float]:
        """What has been computed by when. A step begins when the last one ends or, if nothing was there then,
        with the first window that comes; what comes later waits for the next."""
        first = min((course.stream.sent_at for course in inside), default=now)
        began = max(first, last_end := self._steps.last_end)
        # One that begins with an arrival waits a moment for others. One behind a step does not, and the one
        # before may have ended a while before it was known here.
        latest = first + SAME_STEP_S if first >= last_end else max(first, last_end - SAME_STEP_S)
        later: list[_Course] = []
        for course in inside:
            if course.stream.sent_at <= latest:
                self._push(course)
            else:
                later.append(course)
        batch, seconds = self._next_step()
        for course in later:
            self._push(course)
        return batch, max(now, began + seconds)

    def _next_step(self) -> tuple[list[_Course], float]:
        """A step's windows, at least one if there are any, and its seconds."""
        batch: list[_Course] = []
        room, num_computed = self._max_step_codes, 0
        while self._queue:
            course = self._queue[0][2]
            room -= course.schedule.sent_codes(course.number)
            if batch and room < 0:
                break
            heappop(self._queue)
            batch.append(course)
            num_computed += course.schedule.computed_codes(course.number)
        return batch, self._steps.predict(num_computed)

    def _goes_on(self, course: _Course, now: float) -> None:
        if course.has_next:
            ready = course.next_ready(now, self._max_ahead_s)
            self._num_added += 1
            heappush(self._coming, (ready, self._num_added, course))

    def _push(self, course: _Course) -> None:
        self._num_added += 1
        heappush(self._queue, (course.due, self._num_added, course))
