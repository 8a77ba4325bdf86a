"""What code2wav has to compute before a window that is due at some time: the windows of all streams at one moment."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from omni_server.orchestrator.window_schedule import WindowSchedule

FIRST_DUE_S = 1.0
"""The first window of an utterance is due so long after it is sent. Nobody hears a stall yet: who is being played and
needs a window earlier than that goes first. Where code2wav keeps up, nothing waits for anything else."""


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
    def waiting_s(self) -> float: ...

    @property
    def sent_due(self) -> float: ...

    def has_window(self, first_code: int) -> bool: ...

    def expected_codes_at(self, needed: int) -> float: ...


class _Windows:
    """Windows sorted by the time at which they are due: when each has its codes, and how many."""

    def __init__(self) -> None:
        self.num_codes = 0
        self._due: list[float] = []
        self._windows: list[tuple[float, int]] = []

    def add(self, due: float, codes_at: float, num_codes: int) -> None:
        place = bisect_right(self._due, due)
        self._due.insert(place, due)
        self._windows.insert(place, (codes_at, num_codes))
        self.num_codes += num_codes

    def remove(self, due: float, num_codes: int) -> None:
        """One that was added with these; when its codes are there does not matter."""
        begin, end = bisect_left(self._due, due), bisect_right(self._due, due)
        place = next(place for place in range(begin, end) if self._windows[place][1] == num_codes)
        del self._due[place], self._windows[place]
        self.num_codes -= num_codes

    def until(self, due: float) -> int:
        """Codes of those due until then."""
        return sum(num_codes for _, num_codes in self._windows[: bisect_right(self._due, due)])

    def coming_until(self, due: float, begin: float, end: float) -> int:
        """Codes of those due until `due` whose codes come between `begin` and `end`."""
        windows = self._windows[: bisect_right(self._due, due)]
        return sum(num_codes for codes_at, num_codes in windows if begin <= codes_at <= end)


class _Coming(NamedTuple):
    """A window that has not been sent."""

    due: float
    codes_at: float
    num_codes: int


class DueWindows:
    """Looks at all streams once, for any number of questions.

    A stream that is being played needs each window when what comes before it has been played. Of one that has not
    started only the next window counts, whether it is in code2wav or still to come: it is due as if the stream started
    when it is sent, the first one `FIRST_DUE_S` later.
    """

    def __init__(self, streams: Iterable[Stream], horizon: float) -> None:
        """`horizon`: the latest time that will be asked about."""
        self._horizon = horizon
        self._played = _Windows()
        self._played_inside = _Windows()  # those of them that are in code2wav
        self._coming: dict[Stream, _Coming] = {}  # the next ones of streams that have not started and not sent them
        self._held_inside = _Windows()  # those in code2wav of streams that are not played
        self._inside = 0
        self.longest_wait_s = 0.0
        """For how long the window has been in code2wav that came first, 0 if there is none."""
        for stream in streams:
            inside = _codes_inside(stream)
            self._inside += inside
            if inside and stream.started_at is None:
                self._held_inside.add(stream.sent_due, 0.0, inside)
            self.longest_wait_s = max(self.longest_wait_s, stream.waiting_s)
            self._add_played(stream)
            if (coming := _coming_window(stream)) is not None:
                self._coming[stream] = coming

    def add_played(self, stream: Stream) -> None:
        """For one of `streams` that has started meanwhile. One that has not is left as it is."""
        if _codes_inside(stream) and stream.started_at is not None:
            self._held_inside.remove(stream.sent_due, _codes_inside(stream))
        self._add_played(stream)

    def _add_played(self, stream: Stream) -> None:
        schedule, started_at = stream.schedule, stream.started_at
        if schedule is None or started_at is None:
            return
        self._coming.pop(stream, None)
        number = stream.next_window
        due = started_at + schedule.start_s(number)
        if inside := _codes_inside(stream):
            self._played_inside.add(due, 0.0, inside)
        while due <= self._horizon and stream.has_window(schedule.first_code(number)):
            codes_at = stream.expected_codes_at(schedule.needed_codes(number))
            self._played.add(due, codes_at, schedule.computed_codes(number))
            number += 1
            due = started_at + schedule.start_s(number)

    def codes_inside(self, own: Stream) -> int:
        """Codes of other streams that are in code2wav."""
        return self._inside - _codes_inside(own)

    def codes_before(self, due: float, own: Stream, largest_step: int) -> int:
        """Codes of others that code2wav will have computed before a window of `own`, not yet played, that is due then:
        those of windows due earlier, and what else is in the queue, of which a step is filled up."""
        held = self._held_inside.until(due)
        held_later = self._held_inside.num_codes - held
        if own_inside := _codes_inside(own):
            if own.sent_due <= due:
                held -= own_inside
            else:
                held_later -= own_inside
        filling = self._played_inside.num_codes - self._played_inside.until(due) + held_later
        return held + self._played.until(due) + min(filling, largest_step)

    def codes_coming_before(self, due: float, codes_at: float, own: Stream, within_s: float) -> int:
        """Codes of others' windows that go into a step before one of `own` that gets its codes at `codes_at`, or into
        the same: they are due earlier and get theirs not long before or, of a stream that is played, after that."""
        begin = codes_at - within_s
        num_codes = self._played.coming_until(due, begin, codes_at + within_s)
        for stream, coming in self._coming.items():
            if coming.due <= due and begin <= coming.codes_at <= codes_at and stream is not own:
                num_codes += coming.num_codes
        return num_codes


def _codes_inside(stream: Stream) -> int:
    if stream.schedule is None or not stream.is_waiting:
        return 0
    return stream.schedule.computed_codes(stream.next_window)


def _coming_window(stream: Stream) -> _Coming | None:
    """The next window of a stream that has neither started nor sent it."""
    schedule, number = stream.schedule, stream.next_window
    if schedule is None or stream.started_at is not None or stream.is_waiting:
        return None
    if not stream.has_window(schedule.first_code(number)):
        return None
    codes_at = stream.expected_codes_at(schedule.needed_codes(number))
    due = codes_at + schedule.start_s(number) + (0.0 if number else FIRST_DUE_S)
    return _Coming(due, codes_at, schedule.computed_codes(number))
