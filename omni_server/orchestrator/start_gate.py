"""When a stream's first audio leaves, so that its player does not stall later.

A player starts at the first audio it gets and needs every later piece when the pieces before it have been
played. Under load the second piece can take longer than the first one plays; the remedy is to start later.
Each stream is held until its next windows are expected in time (`Forecast`).
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from omni_server.orchestrator.forecast import FIRST_DUE_S, NUM_AHEAD, Forecast
from omni_server.orchestrator.step_times import StepTimes
from omni_server.orchestrator.talker_pace import TalkerPace
from omni_server.orchestrator.window_schedule import WindowSchedule

MANY_STREAMS = 8
"""So many other streams keep code2wav busy all the time."""
LOOK_INTERVAL_S = 0.02
"""What a stream waits for may stay as far away as it was: looking at all of them takes milliseconds."""
TALKER_SLACK = 1.1
"""The talker may turn out slower than it was by this factor."""
JITTER_S = 0.12
"""A window may come so much later than expected where many streams share the device, less where they are few.
A later start is noticed less than a stall."""


class Playback:
    """One stream as the gate sees it: how far its codes and its windows are, and whether it is being
    played."""

    def __init__(self, gate: "StartGate", start: Callable[[], None]) -> None:
        self._gate = gate
        self.start = start
        """Called once, when the first audio may leave."""
        self.schedule: WindowSchedule | None = None
        """The windows that it is cut into; None before the first, and where there are none before its end."""
        self.started_at: float | None = None
        self.next_window = 0
        """Number of the first window that has not come back."""
        self._sent: deque[tuple[float, float]] = deque()  # of the windows in code2wav: when, and when due
        self._is_complete = False
        self._num_codes = 0
        self._first_codes: tuple[float, int] | None = None  # when, and how many
        self._learned = 0.0, 0  # the codes of which the gate has learned
        self._last_codes_at = 0.0

    def push(self, num_codes: int) -> None:
        """The talker has made so many more."""
        now = self._gate.clock()
        self._num_codes += num_codes
        self._last_codes_at = now
        if self._first_codes is None:
            self._first_codes = self._learned = now, self._num_codes
            return
        learned_at, learned = self._learned
        if self._gate.pace.learn(learned, self._num_codes, now - learned_at):
            self._learned = now, self._num_codes

    def finish(self) -> None:
        """The talker makes no more."""
        self._is_complete = True

    @property
    def is_waiting(self) -> bool:
        """The next window is in code2wav."""
        return bool(self._sent)

    @property
    def sent_at(self) -> float:
        """When the next window was sent, which is in code2wav."""
        return self._sent[0][0]

    @property
    def sent_due(self) -> float:
        """When the next window is due, which is in code2wav."""
        return self._sent[0][1]

    @property
    def plays_unsent_at(self) -> float:
        """When the first window that has not been sent is played, at the earliest.

        Before it is known when the first audio leaves: it cannot leave earlier than now."""
        number = self.next_window + len(self._sent)
        start_s = 0.0 if self.schedule is None else self.schedule.start_s(number)
        return (self._gate.clock() if self.started_at is None else self.started_at) + start_s

    def sent(self) -> float:
        """The first window that had not been sent goes to code2wav; when it is due there.

        That is when it is played, but for the first of an utterance, which has `FIRST_DUE_S` more, and those
        sent before that one has come back, which do not pass it.
        """
        due = self.plays_unsent_at
        if self.next_window == 0 and self.started_at is None:
            due = max(due, self.sent_due) if self._sent else due + FIRST_DUE_S
        self._sent.append((self._gate.clock(), due))
        return due

    def came_back(self, num_codes: int) -> None:
        """The next window has been computed, `num_codes` in all."""
        sent_at, _ = self._sent.popleft()
        self._gate.review(self, num_codes, sent_at)

    def has_window(self, number: int) -> bool:
        """Whether there will be this window; as long as the talker goes on, yes. The last one ends with the
        utterance, also where it has fewer codes behind its own than it would have waited for."""
        if not self._is_complete or self.schedule is None:
            return True
        if number and self._num_codes < self.schedule.needed_codes(number - 1):
            return False
        return self.schedule.first_code(number) < self._num_codes

    def expected_codes_at(self, needed: int) -> float:
        """When the talker will have made `needed` codes, at the pace it has had, and utterances before it
        had."""
        if self._num_codes >= needed or self._is_complete or self._first_codes is None:
            return self._last_codes_at
        first_at, first_count = self._first_codes
        made, last_at = self._num_codes, self._last_codes_at
        pace = self._gate.pace
        if made == first_count and not pace.is_known:
            return last_at
        elapsed_s = last_at - first_at
        next_block = (made // pace.codes_per_block + 1) * pace.codes_per_block
        next_in_s = pace.expected_s(first_count, made, next_block, elapsed_s) * TALKER_SLACK
        late_s = max(0.0, self._gate.clock() - last_at - next_in_s)  # it makes up for nothing
        return last_at + late_s + pace.expected_s(first_count, made, needed, elapsed_s) * TALKER_SLACK


class StartGate:
    """All streams of a server. `clock` is that of the running event loop's timers."""

    def __init__(
        self,
        max_delay_s: float,
        clock: Callable[[], float],
        pace: TalkerPace,
        *,
        max_step_codes: int,
        max_ahead_s: float | None,
    ) -> None:
        """With no delay allowed, every stream starts when its first audio is ready; so does one without a
        schedule. `max_step_codes` and `max_ahead_s`: see `Forecast`."""
        self.clock = clock
        self.pace = pace
        self.steps = StepTimes(clock)
        self._max_delay_s = max_delay_s
        self._max_step_codes = max_step_codes
        self._max_ahead_s = max_ahead_s
        self._streams: dict[Playback, None] = {}
        self._held: dict[Playback, float] = {}  # since when, the earliest first
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_streams(self) -> int:
        """Utterances that are under way."""
        return len(self._streams)

    @contextmanager
    def stream(self, playback: Playback) -> Iterator[None]:
        """`playback` is on its way, from before its first window to its end."""
        self._streams[playback] = None
        try:
            yield
        finally:
            del self._streams[playback]
            self._held.pop(playback, None)
            if not self._held:
                self._cancel_timer()

    def review(self, playback: Playback, num_codes: int, sent_at: float) -> None:
        """A window of `playback` has come back: start what may start now."""
        self.steps.came_back(num_codes, sent_at)
        if playback.next_window == 0:
            self._held[playback] = self.clock()
        playback.next_window += 1
        if self._held:
            # Not at once: windows of one step come back one after the other in the same moment.
            self._look_in(0.0)

    def _release(self) -> None:
        """Start the held streams that need not wait, those first that wait longest."""
        now = self.clock()
        # The more others there are, the more may come in between. Who lacks little of that need not wait for
        # the next look, which is not at once.
        margin_s = JITTER_S * min(1.0, (len(self._streams) - 1) / MANY_STREAMS)
        margin_s = max(0.0, margin_s - LOOK_INTERVAL_S / 2)
        forecast = self._forecast(now) if self._max_delay_s > 0 else None
        next_look_s, limit_s = self._max_delay_s, self._max_delay_s
        for playback, since in list(self._held.items()):
            left_s = since + self._max_delay_s - now  # it is held no longer than that
            delay_s = 0.0 if forecast is None else forecast.late_s(playback) + margin_s
            if min(delay_s, left_s) > 0:
                next_look_s, limit_s = min(next_look_s, delay_s), min(limit_s, left_s)
            else:
                del self._held[playback]
                playback.started_at = now
                playback.start()
        if self._held:
            self._look_in(min(max(next_look_s, LOOK_INTERVAL_S), limit_s))

    def _forecast(self, now: float) -> Forecast:
        return Forecast(
            self._streams,
            self._held,
            self.steps,
            now=now,
            max_step_codes=self._max_step_codes,
            max_ahead_s=self._max_ahead_s,
            horizon=now + self._max_delay_s + max(map(_looked_ahead_s, self._held), default=0.0),
        )

    def _look_in(self, delay_s: float) -> None:
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._release)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _looked_ahead_s(playback: Playback) -> float:
    """Where in its sound the last window begins that is looked at."""
    schedule = playback.schedule
    return 0.0 if schedule is None else schedule.start_s(playback.next_window + NUM_AHEAD - 1)
