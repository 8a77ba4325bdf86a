"""The scheduler of all speech streams of a decoder: it decides when windows are computed and when playback
begins.

It has two rules:

1. Earliest playout deadline first. The deadline of a window is the moment at which it will be played. The
   first window of a stream is due `FIRST_WINDOW_DUE_S` after it was sent, because a stream that has not begun
   cannot stall. Under overload, callers take turns (`WindowFairness`).
2. Playback begins when the buffer covers the expected turnaround, that is, when every later window is
   expected back before it is played. If audio is produced more slowly than it is played, playback waits for
   as much as is missing, up to `max_start_delay_s`.

A frame is the codec tokens of one position, one per codebook. The source is the stage that samples the
frames. All times are seconds on one monotonic clock with an arbitrary origin.
"""

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from omni_server.config.chunk_plan import ChunkPlan, output_ends
from omni_server.family.codec import CodecLayout
from omni_server.orchestrator.fair_share import WindowFairness
from omni_server.orchestrator.speech_estimates import (
    MAX_OUTLIER_RATIO,
    CodecRateEstimator,
    TurnaroundEstimator,
)

FIRST_WINDOW_DUE_S = 1.0
"""Seconds after which the first window of a stream takes precedence over windows of streams that are playing
and are due now."""

NUM_RECENT_STREAMS = 16
"""A stream whose end is unknown is assumed to be as long as the longest of this many recent streams."""

MIN_EXPECTED_S = 5.0
"""Assumed minimum length of a stream whose end is unknown, in seconds of audio: that of a typical answer. The
first streams after a start have no recent streams to compare with."""

MIN_RECHECK_S = 0.02
"""Minimum seconds between two checks of a stream whose playback has not begun. On average, playback begins
half of this late. A check takes less than a millisecond of the event loop."""


class WindowRamp:
    """The windows of a stream, numbered from 0. `stages.codec_chunking` cuts the stream into them."""

    def __init__(self, plan: ChunkPlan, layout: CodecLayout, new_blocks: tuple[int, ...]) -> None:
        self.new_blocks = new_blocks
        self._past_blocks = 0 if plan.carries_state else plan.past_blocks
        self._future_blocks = plan.future_blocks
        self._frames_per_block = layout.frames_per_block
        self._layout = layout

    def first_frame(self, number: int) -> int:
        """The first frame of the window's audio."""
        return self._first_block(number) * self._frames_per_block

    def start_s(self, number: int) -> float:
        """Where in the stream the window's audio begins, in seconds."""
        return self._layout.first_sample(self.first_frame(number)) / self._layout.sample_rate_hz

    def needed_frames(self, number: int) -> int:
        """Frames of the stream that must exist before the window can be cut."""
        return self.first_frame(number + 1) + self._future_blocks * self._frames_per_block

    def computed_frames(self, number: int) -> int:
        """Frames that the decoder computes for the window, including context that it does not carry as
        state."""
        first_block = self._first_block(number)
        past_blocks = min(self._past_blocks, first_block)
        return self.needed_frames(number) - (first_block - past_blocks) * self._frames_per_block

    def _first_block(self, number: int) -> int:
        ramp = self.new_blocks
        return sum(ramp[:number]) + max(0, number - len(ramp)) * ramp[-1]


class PlayoutClock:
    """The progress of one stream's frames and windows, and the start of its playback."""

    def __init__(
        self,
        scheduler: "SpeechScheduler",
        start: Callable[[], None],
        caller: str,
        *,
        may_pause: bool = False,
    ) -> None:
        """`start` is called once, when playback begins. `may_pause`: the source may wait for its text, and
        how long it takes says nothing of other streams."""
        self._scheduler = scheduler
        self._may_pause = may_pause
        self._blocks_per_output = scheduler.blocks_per_output(may_pause=may_pause)
        self._caller = caller
        self._start = start
        self.ramp: WindowRamp | None = None
        """None before the first window, and if the stream is computed as a whole at its end."""
        self.started_at: float | None = None
        self._held_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._num_back = 0  # windows
        self._sent: deque[tuple[float, float]] = deque()  # windows in the decoder: time of sending, deadline
        self._num_frames = 0
        self._is_complete = False
        self._last_frames_at = 0.0
        self._first_block: tuple[int, float] | None = None  # number, and time of arrival
        self._last_block: tuple[int, float] | None = None
        self._usual_s = 0.0  # expected time between the two, before these blocks were learned

    def push(self, num_frames: int) -> None:
        """The source has sampled `num_frames` more frames."""
        now = self._scheduler.clock()
        self._num_frames += num_frames
        self._last_frames_at = now
        block = self._num_frames // self._scheduler.frames_per_block
        if self._first_block is None or self._last_block is None:
            self._first_block = self._last_block = block, now
        before, before_at = self._last_block
        if block > before:
            self._usual_s += self._scheduler.rates.expected_s(before, block) or now - before_at
            for number in () if self._may_pause else range(before, block):
                self._scheduler.rates.learn(number, (now - before_at) / (block - before))
            self._last_block = block, now

    def finish(self) -> None:
        """The source has sampled its last frame."""
        self._is_complete = True
        self._scheduler.recent_frames.append(self._num_frames)

    def window_sent(self, start_s: float) -> float:
        """The next window is sent to the decoder; its audio begins at `start_s`. Returns its deadline, which
        is never before that of a first window that is still in the decoder. If playback has not begun, it is
        assumed to begin now; if it has paused, to go on now."""
        now = self._scheduler.clock()
        if self._may_pause and self.started_at is not None:
            self.started_at = max(self.started_at, now - start_s)
        due = (now if self.started_at is None else self.started_at) + start_s
        not_before = -math.inf
        if self._num_back == 0 and self.started_at is None:
            if self._sent:
                not_before = self._sent[-1][1]
                due = max(due, not_before)
            else:
                due += FIRST_WINDOW_DUE_S
        due = self._scheduler.fairness.enter(self._caller, due, now, not_before=not_before)
        self._sent.append((now, due))
        return due

    def window_completed(self, num_frames: int) -> None:
        """The next result has arrived. The decoder computed `num_frames` for it."""
        now = self._scheduler.clock()
        sent_at, due = self._sent.popleft()
        self._scheduler.fairness.leave(self._caller, due)
        if due - sent_at <= FIRST_WINDOW_DUE_S:  # those due later give way to more urgent ones
            is_first = self._num_back == 0
            self._scheduler.turnaround.learn(
                num_frames, now - sent_at, now, num_streams=self._scheduler.num_streams, is_first=is_first
            )
        self._num_back += 1
        if self.started_at is None:
            if self._held_since is None:
                self._held_since = now
            # Not at once: the results of one step arrive one after the other within the same moment.
            self._look_in(0.0)

    def begin(self) -> None:
        """Begins playback, if it has not begun."""
        self._cancel_look()
        if self.started_at is None:
            self.started_at = self._scheduler.clock()
            self._start()

    def close(self) -> None:
        """The stream has ended: no window of it is in the decoder, and playback will not begin any more."""
        self._cancel_look()
        while self._sent:
            _, due = self._sent.popleft()
            self._scheduler.fairness.leave(self._caller, due)

    def _cancel_look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_in(self, delay_s: float) -> None:
        self._cancel_look()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        """Begins playback, or checks again when the buffer is expected to suffice."""
        assert self._held_since is not None
        now = self._scheduler.clock()
        left_s = self._held_since + self._scheduler.max_start_delay_s - now
        wait_s = self._missing_s(now) if left_s > 0 else 0.0
        if min(wait_s, left_s) > 0:
            self._look_in(min(max(wait_s, MIN_RECHECK_S), left_s))
            return
        self.begin()

    def _missing_s(self, now: float) -> float:
        """Returns by how many seconds the latest of the coming windows would be late if playback began
        `now`."""
        if self.ramp is None:
            return 0.0
        turnaround, rates = self._scheduler.turnaround, self._scheduler.rates
        num_streams = self._scheduler.num_streams
        margin_s = turnaround.margin_s(num_streams)
        per_block, slowness = self._scheduler.frames_per_block, self._slowness()
        made = self._num_frames / per_block
        # If the next output is overdue, it is not expected to catch up.
        coming = next(end for end in output_ends(self._blocks_per_output) if end > made)
        frames_at = max(self._last_frames_at, now - slowness * rates.expected_s(made, coming))
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
            back = max(now, sent_at + turnaround.expected_s(self.ramp.computed_frames(number), num_streams))
            missing_s = max(missing_s, back + margin_s - now - self.ramp.start_s(number))
        raise AssertionError("a stream has an end")

    def _is_expected(self, number: int) -> bool:
        """Whether the stream is expected to have this window: it belongs to the first `MIN_EXPECTED_S`, or
        the longest of the recent streams had it. Exact once the source is complete."""
        if self._is_complete or self.ramp is None:
            return self.has_window(number)
        longest = max(self._scheduler.recent_frames, default=0)
        is_usual = self.ramp.start_s(number) < MIN_EXPECTED_S
        return is_usual or self.ramp.first_frame(number) < max(longest, self._num_frames)

    def has_window(self, number: int) -> bool:
        """Whether the stream may still have this window. The last window ends with the stream, even if fewer
        frames of future context follow it than usual."""
        if not self._is_complete or self.ramp is None:
            return True
        if number and self._num_frames < self.ramp.needed_frames(number - 1):
            return False
        return self.ramp.first_frame(number) < self._num_frames

    def _slowness(self) -> float:
        """The ratio of the time that the source has taken for this stream's blocks to the expected time. The
        load may have changed since the averages were formed."""
        if self._first_block is None or self._last_block is None or not self._usual_s:
            return 1.0
        slowness = (self._last_block[1] - self._first_block[1]) / self._usual_s
        return min(max(slowness, 1 / MAX_OUTLIER_RATIO), MAX_OUTLIER_RATIO)


class PendingStreams:
    """Counts streams whose first frame has not been sampled. No decoder has been chosen for them yet; each
    decoder expects an equal part of them."""

    def __init__(self, num_decoders: int = 1) -> None:
        self._num_decoders = num_decoders
        self._count = 0

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Counts a stream while the block runs."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1

    @property
    def num_per_decoder(self) -> int:
        return math.ceil(self._count / self._num_decoders)


class SpeechScheduler:
    """The state that all streams of one decoder share."""

    def __init__(
        self,
        plan: ChunkPlan,
        layout: CodecLayout,
        pending: PendingStreams,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` must advance with the running event loop's timers."""
        self.clock = clock
        self._pending = pending
        self.max_outstanding_windows = plan.max_outstanding_windows
        self.max_start_delay_s = plan.max_start_delay_s
        self.frames_per_block = layout.frames_per_block
        self.blocks_per_output = plan.blocks_per_output
        self.fairness = WindowFairness()
        self.turnaround = TurnaroundEstimator()
        self.rates = CodecRateEstimator()
        self.recent_frames: deque[int] = deque(maxlen=NUM_RECENT_STREAMS)
        """Lengths of the streams that ended most recently."""
        self._num_open = 0
        self._ramps: list[tuple[int, WindowRamp]] = []  # minimum number of streams (ascending), ramp
        if plan.mode == "windows":
            ramps = [(0, plan.new_blocks), *((busy.min_streams, busy.new_blocks) for busy in plan.busy)]
            self._ramps = [(least, WindowRamp(plan, layout, ramp)) for least, ramp in ramps]
        self._origin = clock()

    def reset(self) -> None:
        """Forgets all estimates. After a warm-up they are wrong, because its windows waited for kernels to
        compile."""
        self.turnaround = TurnaroundEstimator()
        self.rates = CodecRateEstimator()
        self.recent_frames.clear()

    @contextmanager
    def stream(self, playout: PlayoutClock) -> Iterator[None]:
        """Counts the stream of `playout` as active while the block runs."""
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            playout.close()

    @property
    def num_streams(self) -> int:
        """Active streams and those that are coming."""
        return self._num_open + self._pending.num_per_decoder

    def ramp(self) -> WindowRamp | None:
        """Returns the ramp for a stream whose first window is cut now; None if streams are computed as a
        whole."""
        num_streams = self.num_streams
        return next((ramp for least, ramp in reversed(self._ramps) if num_streams >= least), None)

    def priority(self, due: float) -> int:
        """Returns the decoder's priority for the deadline `due`: milliseconds since the server's start."""
        return round((due - self._origin) * 1000)
