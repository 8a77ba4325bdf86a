"""When each stream's windows are computed, and when its playback begins. One scheduler serves all streams.

Three rules:

1. Earliest playout deadline first. A window's deadline is the moment at which it will be played; that of a
   stream's first window is `FIRST_WINDOW_DUE_S` after it was sent, because nobody hears a stall yet.
2. Credits. A stream that is `max_work_ahead_s` ahead of its playback leaves the decoder to the others.
3. Playback begins when the buffer covers the expected turnaround: when each later window is expected back
   before it is to be played. If production is slower than real time, that waits for as much as is missing,
   for `max_start_delay_s` at most.

A frame is the codec tokens of one position, one per codebook; the frames come from the stage that speaks, the
source. All times are seconds of one monotonic clock, of any origin.
"""

import asyncio
import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.family import CodecLayout

FIRST_WINDOW_DUE_S = 1.0
"""Seconds that the first window of a stream may take before it goes ahead of windows of streams that are
being played."""

MIN_OUTSTANDING_WINDOWS = 2
"""Windows that keep the decoder busy: one is computed, one is next. While fewer are there, credits do not
count."""

AVERAGE_WEIGHT = 0.05
"""Share of the newest value in each moving average of turnarounds: 20 windows, about a second under load. Of
fewer windows it is their mean, so that one that took long, as the first after a restart does, is soon
outweighed."""

FORGET_S = 5.0
"""Turnarounds of before are forgotten where nothing has come back for so long: that load is over."""

NUM_DEVIATIONS = 2.0
"""The buffer covers the expected turnaround and so many mean deviations of it. With 1.5, on an H200, 64
callers with answers of 2 to 9 s had stalls of 0.15 s (p99), and first audio 0.1 s before what it was with
seven tuned rules (benchmarks/scheduler.md)."""

RATE_WEIGHT = 0.2
"""Share of the newest stream in the moving averages of the source's rate: five streams."""

MAX_OUTLIER_RATIO = 3.0
"""The time of a block of frames is clamped to so many times the moving average: a client's tool or a stage
that was restarted kept one stream waiting, and will not keep the next one."""

NUM_RECENT_STREAMS = 16
"""As long as the longest of so many is a stream taken to be while nobody knows its length."""

MIN_EXPECTED_S = 5.0
"""Seconds of audio that a stream is taken to have at least, while its source goes on: a usual answer's. The
first streams after a start have no others to go by."""

MIN_RECHECK_S = 0.02
"""Seconds between two looks at a stream whose playback has not begun: it begins half of that late on average,
which nobody hears, and a look takes the event loop less than a millisecond."""


class WindowRamp:
    """The windows that a stream is cut into, by number from 0 on (`stages.codec_chunking` does the
    cutting)."""

    def __init__(self, plan: ChunkPlan, layout: CodecLayout, new_blocks: tuple[int, ...]) -> None:
        self.new_blocks = new_blocks
        self._past_blocks = 0 if plan.carries_state else plan.past_blocks
        self._future_blocks = plan.future_blocks
        self._frames_per_block = layout.frames_per_block
        self._frame_s = layout.samples_per_frame / layout.sample_rate_hz

    def first_frame(self, number: int) -> int:
        """The frame with which the window's audio begins."""
        return self._first_block(number) * self._frames_per_block

    def start_s(self, number: int) -> float:
        """Where in the stream the window's audio begins, in seconds."""
        return self.first_frame(number) * self._frame_s

    def needed_frames(self, number: int) -> int:
        """Frames that must be there before the window can be cut."""
        return self.first_frame(number + 1) + self._future_blocks * self._frames_per_block

    def computed_frames(self, number: int) -> int:
        """Frames that the decoder computes for the window, its context included but for what it carries."""
        first_block = self._first_block(number)
        past_blocks = min(self._past_blocks, first_block)
        return self.needed_frames(number) - (first_block - past_blocks) * self._frames_per_block

    def _first_block(self, number: int) -> int:
        ramp = self.new_blocks
        return sum(ramp[:number]) + max(0, number - len(ramp)) * ramp[-1]


class TurnaroundEstimator:
    """Seconds from sending a window to its coming back, as a line over its frames, and how far windows
    miss it.

    Exponentially weighted least squares: a large window takes longer where the decoder computes slowly, and
    hardly longer where windows mostly wait for each other."""

    def __init__(self) -> None:
        self._mean_frames = self._mean_s = self._frames_variance = self._covariance = self._miss_s = 0.0
        self._num_learned = 0
        self._learned_at = 0.0

    def learn(self, num_frames: int, seconds: float, now: float) -> None:
        """Of a window that has come back at `now`."""
        if now - self._learned_at > FORGET_S:
            self._num_learned = 0
        self._learned_at = now
        self._num_learned += 1
        weight = max(AVERAGE_WEIGHT, 1 / self._num_learned)
        frames, late_s = num_frames - self._mean_frames, seconds - self._mean_s
        self._mean_frames += weight * frames
        self._mean_s += weight * late_s
        self._frames_variance = (1 - weight) * (self._frames_variance + weight * frames * frames)
        self._covariance = (1 - weight) * (self._covariance + weight * frames * late_s)
        self._miss_s += weight * (abs(seconds - self._line(num_frames)) - self._miss_s)

    def expected_s(self, num_frames: int) -> float:
        """0 while nothing is known."""
        return self._line(num_frames) + NUM_DEVIATIONS * self._miss_s

    def _line(self, num_frames: int) -> float:
        if not self._num_learned:
            return 0.0
        slope = max(0.0, self._covariance / self._frames_variance) if self._frames_variance else 0.0
        slope = min(slope, self._mean_s / self._mean_frames)
        return self._mean_s + slope * (num_frames - self._mean_frames)


class CodecRateEstimator:
    """Seconds that the source takes for each block of frames, by its place in the stream.

    By place, because a stream's frames do not come evenly: as long as text is written, each waits for a token
    of it; after that they come two or three times as fast."""

    def __init__(self) -> None:
        self._block_s: list[float] = []

    def learn(self, block: int, seconds: float) -> None:
        known = self._block_s
        if block >= len(known):  # places that nobody has told of are as the next one known
            known += [seconds] * (block + 1 - len(known))
            return
        known[block] += RATE_WEIGHT * (min(seconds, MAX_OUTLIER_RATIO * known[block]) - known[block])

    def expected_s(self, first: float, end: float) -> float:
        """For the blocks from `first` to `end`, of which parts may be asked for; 0 if nothing is known."""
        known = self._block_s
        if not known:
            return 0.0
        total_s, block = 0.0, first
        while block < end:
            if block >= len(known):
                return total_s + (end - block) * known[-1]
            until = min(int(block) + 1, end)
            total_s += (until - block) * known[int(block)]
            block = until
        return total_s


class LeadLimiter:
    """Credits: windows of streams that are far ahead of their playback stay out of the decoder while it
    has others."""

    def __init__(self, max_lead_s: float | None, clock: Callable[[], float]) -> None:
        """`max_lead_s`: seconds of audio; None: no limit."""
        self._max_lead_s = max_lead_s
        self._clock = clock
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []  # by when due
        self._num_asked = 0
        self.num_inside = 0

    @property
    def num_waiting(self) -> int:
        """Windows that are kept out, at most one of each stream."""
        return sum(not entered.done() for _, _, entered in self._waiting)

    async def enter(self, due: float) -> None:
        """Returns when a window that is to be played at `due` may be sent; `leave` must follow. Of those that
        wait the one that is due first enters first. A cancelled call has not entered."""
        ahead_s = 0.0 if self._max_lead_s is None else due - self._clock() - self._max_lead_s
        if ahead_s <= 0 or self.num_inside < MIN_OUTSTANDING_WINDOWS:
            self.num_inside += 1
            return
        loop = asyncio.get_running_loop()
        entered: asyncio.Future[None] = loop.create_future()
        self._num_asked += 1
        heapq.heappush(self._waiting, (due, self._num_asked, entered))
        timer = loop.call_later(ahead_s, self._admit, entered)
        try:
            await entered
        except asyncio.CancelledError:
            if not entered.cancelled():  # admitted, but it will not be sent
                self.leave()
            raise
        finally:
            timer.cancel()

    def leave(self) -> None:
        """The window has been computed, or never will be."""
        self.num_inside -= 1
        while self._waiting and self.num_inside < MIN_OUTSTANDING_WINDOWS:
            self._admit(heapq.heappop(self._waiting)[2])

    def _admit(self, entered: asyncio.Future[None]) -> None:
        # Its timer may come after another admission, and either after its task was cancelled.
        if not entered.done():
            self.num_inside += 1
            entered.set_result(None)


class PlayoutBuffer:
    """One stream: how far its frames and its windows are, and when its playback begins."""

    def __init__(self, scheduler: "SpeechScheduler", start: Callable[[], None]) -> None:
        """`start` is called once, when the first audio may leave."""
        self._scheduler = scheduler
        self._start = start
        self.ramp: WindowRamp | None = None
        """None before the first window, and where there is none before the end."""
        self.started_at: float | None = None
        self._held_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._num_back = 0  # windows
        self._sent: deque[tuple[float, float]] = deque()  # of the windows in the decoder: when, and when due
        self._num_frames = 0
        self._is_complete = False
        self._last_frames_at = 0.0
        self._first_block: tuple[int, float] | None = None  # its number and when it came
        self._last_block: tuple[int, float] | None = None
        self._usual_s = 0.0  # what the blocks between them usually took, before they were learned from

    def push(self, num_frames: int) -> None:
        """The source has made `num_frames` more."""
        now = self._scheduler.clock()
        self._num_frames += num_frames
        self._last_frames_at = now
        block = self._num_frames // self._scheduler.frames_per_block
        if self._first_block is None or self._last_block is None:
            self._first_block = self._last_block = block, now
        before, before_at = self._last_block
        if block > before:
            self._usual_s += self._scheduler.rates.expected_s(before, block) or now - before_at
            for number in range(before, block):
                self._scheduler.rates.learn(number, (now - before_at) / (block - before))
            self._last_block = block, now

    def finish(self) -> None:
        """The source makes no more."""
        self._is_complete = True
        self._scheduler.recent_frames.append(self._num_frames)

    @property
    def next_due(self) -> float:
        """When the first window that has not been sent is played, at the earliest: playback that has not
        begun begins now."""
        number = self._num_back + len(self._sent)
        start_s = 0.0 if self.ramp is None else self.ramp.start_s(number)
        return (self._scheduler.clock() if self.started_at is None else self.started_at) + start_s

    def window_sent(self) -> float:
        """The next window goes to the decoder; returns its deadline. Windows that are sent before the first has
        come back do not pass it."""
        due = self.next_due
        if self._num_back == 0 and self.started_at is None:
            due = max(due, self._sent[-1][1]) if self._sent else due + FIRST_WINDOW_DUE_S
        self._sent.append((self._scheduler.clock(), due))
        return due

    def window_back(self, num_frames: int) -> None:
        """The next window has come back; `num_frames` were computed for it."""
        now = self._scheduler.clock()
        sent_at, due = self._sent.popleft()
        if due - sent_at <= FIRST_WINDOW_DUE_S:  # those that are needed later wait for others
            self._scheduler.turnaround.learn(num_frames, now - sent_at, now)
        self._num_back += 1
        if self.started_at is None:
            if self._held_since is None:
                self._held_since = now
            # Not at once: windows of one step come back one after the other in the same moment.
            self._look_in(0.0)

    def close(self) -> None:
        """The stream has ended; its playback does not begin any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_in(self, delay_s: float) -> None:
        self.close()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        """Begin playback, or look again when it is expected to be possible."""
        assert self._held_since is not None
        now = self._scheduler.clock()
        left_s = self._held_since + self._scheduler.max_start_delay_s - now
        wait_s = self._missing_s(now) if left_s > 0 else 0.0
        if min(wait_s, left_s) > 0:
            self._look_in(min(max(wait_s, MIN_RECHECK_S), left_s))
            return
        self.started_at = now
        self._start()

    def _missing_s(self, now: float) -> float:
        """By how much the latest of the windows to come would be late if playback began `now`."""
        if self.ramp is None:
            return 0.0
        turnaround, rates = self._scheduler.turnaround, self._scheduler.rates
        per_block, slowness = self._scheduler.frames_per_block, self._slowness()
        made = self._num_frames / per_block
        # A source that is later than expected with its next block makes up for nothing.
        frames_at = max(self._last_frames_at, now - slowness * rates.expected_s(made, int(made) + 1))
        back, missing_s = now, 0.0
        for number in itertools.count(self._num_back):
            if not self._is_expected(number):
                return missing_s
            num_ahead = number - self._num_back
            if num_ahead < len(self._sent):
                sent_at, _ = self._sent[num_ahead]
            else:
                needed = self.ramp.needed_frames(number) / per_block
                if needed > made and not self._is_complete:
                    frames_at += slowness * rates.expected_s(made, needed)
                    made = needed
                    sent_at = max(back, frames_at)
                else:
                    sent_at = back
            back = max(now, sent_at + turnaround.expected_s(self.ramp.computed_frames(number)))
            missing_s = max(missing_s, back - now - self.ramp.start_s(number))
        raise AssertionError("a stream has an end")

    def _is_expected(self, number: int) -> bool:
        """There will be this window, as far as one can tell: while the source goes on, those that the longest
        of the last streams had, or those of `MIN_EXPECTED_S`."""
        if self._is_complete or self.ramp is None:
            return self.has_window(number)
        longest = max(self._scheduler.recent_frames, default=0)
        is_usual = self.ramp.start_s(number) < MIN_EXPECTED_S
        return is_usual or self.ramp.first_frame(number) < max(longest, self._num_frames)

    def has_window(self, number: int) -> bool:
        """Whether there will be this window; as long as the source goes on, yes. The last one ends with the
        stream, also where it has fewer frames behind its own than it would have waited for."""
        if not self._is_complete or self.ramp is None:
            return True
        if number and self._num_frames < self.ramp.needed_frames(number - 1):
            return False
        return self.ramp.first_frame(number) < self._num_frames

    def _slowness(self) -> float:
        """How much longer than usual the source has taken for the stream's blocks: load changes by steps."""
        if self._first_block is None or self._last_block is None or not self._usual_s:
            return 1.0
        slowness = (self._last_block[1] - self._first_block[1]) / self._usual_s
        return min(max(slowness, 1 / MAX_OUTLIER_RATIO), MAX_OUTLIER_RATIO)


class SpeechScheduler:
    """What the streams of a server share."""

    def __init__(
        self, plan: ChunkPlan, layout: CodecLayout, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock` must be that of the running event loop's timers, of any origin."""
        self.clock = clock
        self.max_outstanding_windows = plan.max_outstanding_windows
        """Of one stream, in the decoder at once."""
        self.max_start_delay_s = plan.pacing.max_start_delay_s
        self.frames_per_block = layout.frames_per_block
        self.limiter = LeadLimiter(plan.pacing.max_work_ahead_s, clock)
        self.turnaround = TurnaroundEstimator()
        self.rates = CodecRateEstimator()
        self.recent_frames: deque[int] = deque(maxlen=NUM_RECENT_STREAMS)
        """Lengths of the last streams that have ended."""
        self._num_open = 0
        self._ramps: list[tuple[int, WindowRamp]] = []  # from how many streams on, ascending
        if plan.mode == "windows":
            ramps = [(0, plan.new_blocks), *((busy.min_streams, busy.new_blocks) for busy in plan.busy)]
            self._ramps = [(least, WindowRamp(plan, layout, ramp)) for least, ramp in ramps]
        self._origin = clock()

    def forget(self) -> None:
        """What was learned so far does not hold for what is to come: of a warm-up, whose windows wait for kernels
        that are compiled."""
        self.turnaround = TurnaroundEstimator()
        self.rates = CodecRateEstimator()
        self.recent_frames.clear()

    @contextmanager
    def stream(self, buffer: PlayoutBuffer) -> Iterator[None]:
        """`buffer` is active, from before its first window to its end."""
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            buffer.close()

    @property
    def num_streams(self) -> int:
        """Active streams, but for those that have no credit and wait."""
        return self._num_open - self.limiter.num_waiting

    def ramp(self) -> WindowRamp | None:
        """For a stream that is cut into its first window now; None where there are no windows before its
        end."""
        num_streams = self.num_streams
        return next((ramp for least, ramp in reversed(self._ramps) if num_streams >= least), None)

    def priority(self, due: float) -> int:
        """The decoder's priority of a window that is to be played at `due`: milliseconds since the server's
        start."""
        return round((due - self._origin) * 1000)
