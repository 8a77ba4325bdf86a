"""What the scheduler of speech expects: how long a window takes, and how fast frames are sampled.

All times are seconds on one monotonic clock with an arbitrary origin.
"""

import math

AVERAGE_WEIGHT = 0.05
"""Weight of the newest value in the moving averages of turnarounds: they cover 20 windows, about a second
under load. While fewer windows are known, the average is their mean, so that a slow first window after a
restart is soon outweighed."""

FORGET_S = 5.0
"""Seconds without any window after which turnarounds are forgotten, because the load has changed."""

NUM_DEVIATIONS = 2.5
"""Mean deviations of the turnaround that the buffer covers in addition to the expected values. A larger value
trades later first audio for shorter stalls (benchmarks/scheduler.md has both for 2, 2.5 and 3)."""

RATE_WEIGHT = 0.2
"""Weight of the newest stream in the moving averages of the source's rate: they cover five streams."""

MAX_OUTLIER_RATIO = 3.0
"""Clamps the time of a block of frames to this multiple of its moving average. A restarted stage, for
example, delays one stream and not the next one."""


class TurnaroundEstimator:
    """Estimates the turnaround of a window, in seconds from sending it to its result, from its frames and the
    number of active streams.

    The estimate is a line over the number of frames, fitted by exponentially weighted least squares. The
    slope is steep where the decoder is slow, and flat where windows mostly wait for each other. The line is
    for one stream; with more, the steps of the decoder have more windows, and take longer by about the square
    root of their number (benchmarks/scheduler.md). So a change of load is known at once."""

    def __init__(self) -> None:
        self._mean_frames = self._mean_s = self._frames_variance = self._covariance = self._miss_s = 0.0
        self._num_learned = 0
        self._learned_at = 0.0

    def learn(
        self, num_frames: int, seconds: float, now: float, *, num_streams: int, is_first: bool = False
    ) -> None:
        """Adds a window whose result arrived at `now`, when there were `num_streams` active streams.

        The margin ignores the first window of a stream (`is_first`). It has another deadline than the windows
        that the margin is for, and on a slow machine it competes with its own prompt."""
        seconds /= math.sqrt(num_streams)
        if now - self._learned_at > FORGET_S:
            self._num_learned, self._miss_s = 0, 0.0
        self._learned_at = now
        self._num_learned += 1
        weight = max(AVERAGE_WEIGHT, 1 / self._num_learned)
        frames, late_s = num_frames - self._mean_frames, seconds - self._mean_s
        self._mean_frames += weight * frames
        self._mean_s += weight * late_s
        self._frames_variance = (1 - weight) * (self._frames_variance + weight * frames * frames)
        self._covariance = (1 - weight) * (self._covariance + weight * frames * late_s)
        if not is_first:
            self._miss_s += weight * (abs(seconds - self.expected_s(num_frames, 1)) - self._miss_s)

    def margin_s(self, num_streams: int) -> float:
        """`NUM_DEVIATIONS` mean deviations from the line."""
        return NUM_DEVIATIONS * self._miss_s * math.sqrt(num_streams)

    def expected_s(self, num_frames: int, num_streams: int) -> float:
        """Returns 0 if no turnaround is known."""
        if not self._num_learned:
            return 0.0
        slope = max(0.0, self._covariance / self._frames_variance) if self._frames_variance else 0.0
        slope = min(slope, self._mean_s / self._mean_frames)
        return (self._mean_s + slope * (num_frames - self._mean_frames)) * math.sqrt(num_streams)


class CodecRateEstimator:
    """Estimates the seconds that the source takes per block of frames, by the block's place in the stream.

    The place matters because frames wait for text tokens as long as there is more text, and come two or three
    times as fast afterwards."""

    def __init__(self) -> None:
        self._block_s: list[float] = []

    def learn(self, block: int, seconds: float) -> None:
        known = self._block_s
        if block >= len(known):  # unknown places before this one get the same value
            known += [seconds] * (block + 1 - len(known))
            return
        known[block] += RATE_WEIGHT * (min(seconds, MAX_OUTLIER_RATIO * known[block]) - known[block])

    def expected_s(self, first: float, end: float) -> float:
        """Returns the time for the blocks from `first` to `end`, which may be fractions; 0 if nothing is
        known."""
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
