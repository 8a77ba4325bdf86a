"""How long a stream's first audio has to wait so that its player does not stall later.

A player starts at the first audio it gets and needs every later piece when the pieces before it have been played.
Under load the second piece can take longer than the first one plays. The remedy is to start later; by how much shows
in the streams that started shortly before.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NUM_RECENT = 16
"""Streams that are looked at."""
HORIZON_S = 20.0
"""Streams that started longer ago tell nothing about the load of now."""
NUM_IGNORED = 1
"""The latest of the recent streams is left out: one hiccup is no load."""
MAX_LOAD_RATIO = 2
"""Streams that started while more than this many times as many were on their way as are now tell nothing either."""


class Playback:
    """An imagined player that started the moment a stream's first audio was ready, whenever that was sent.

    Positions are seconds of audio from the stream's beginning.
    """

    def __init__(self, started_at: float, end_s: float, num_streams: int) -> None:
        """`end_s` is the end of the first piece; `num_streams` are on their way at this moment, this one included."""
        self.started_at = started_at
        self.num_streams = num_streams
        self._end_s = end_s
        self._lateness_s = 0.0
        self._is_ended = False

    def extend(self, start_s: float, end_s: float, now: float) -> None:
        """The piece from `start_s` to `end_s` is ready."""
        self._lateness_s = max(self._lateness_s, now - (self.started_at + start_s))
        self._end_s = end_s

    def end(self) -> None:
        """No piece follows."""
        self._is_ended = True

    def lateness_s(self, now: float) -> float:
        """Seconds that the player should have waited at its start, as far as is known; a piece that is overdue counts
        as if it came now."""
        if self._is_ended:
            return self._lateness_s
        return max(self._lateness_s, now - (self.started_at + self._end_s))


class StartDelay:
    """What recent streams would have needed, for the next one. One for all streams of a server."""

    def __init__(self, max_s: float, clock: Callable[[], float]) -> None:
        self._max_s = max_s
        self._clock = clock
        self._recent: deque[Playback] = deque(maxlen=NUM_RECENT)
        self._num_streams = 0

    @contextmanager
    def stream(self) -> Iterator[None]:
        """A stream is on its way, from before its first piece to its end: so the load is known."""
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    def start(self, end_s: float) -> Playback:
        """A stream's first piece, `end_s` seconds long, is ready. Tell the result of what follows."""
        playback = Playback(self._clock(), end_s, self._num_streams)
        self._recent.append(playback)
        return playback

    def delay_s(self) -> float:
        """Seconds by which to hold back the first audio of a stream; 0 if nothing was late or nothing is known."""
        now = self._clock()
        most = MAX_LOAD_RATIO * self._num_streams
        lateness = sorted(
            p.lateness_s(now) for p in self._recent if now - p.started_at < HORIZON_S and p.num_streams <= most
        )
        usual = lateness[: len(lateness) - NUM_IGNORED]
        return min(usual[-1], self._max_s) if usual else 0.0
