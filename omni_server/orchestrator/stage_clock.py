"""When a request passed which stage."""

import time
from collections.abc import Callable, Sequence

from omni_server.edge import Code2WavRequest, CodecEdge
from omni_server.types import StageTimes


class StageClock:
    """Notes times in seconds since its creation."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._num_windows = 0

    def text(self) -> None:
        """The thinker has sent tokens."""
        self._note("text")

    def talker(self) -> None:
        """The talker has been given the request."""
        self._note("talker")

    def codes(self) -> None:
        """The talker has sent tokens."""
        self._note("codes")

    def windows(self, count: int) -> None:
        """So many windows have become complete."""
        if count:
            self._num_windows += count
            self._note("window")

    def audio(self) -> None:
        """Sound has left."""
        self._note("audio")

    def times(self) -> StageTimes:
        """So far."""
        return StageTimes(
            first_text_s=self._first.get("text"),
            last_text_s=self._last.get("text"),
            talker_opened_s=self._first.get("talker"),
            first_codes_s=self._first.get("codes"),
            last_codes_s=self._last.get("codes"),
            first_window_s=self._first.get("window"),
            last_window_s=self._last.get("window"),
            first_audio_s=self._first.get("audio"),
            last_audio_s=self._last.get("audio"),
            num_windows=self._num_windows,
        )

    def _note(self, what: str) -> None:
        now = self._clock() - self._began
        self._first.setdefault(what, now)
        self._last[what] = now


class TimedEdge:
    """A `CodecEdge` that tells the clock of its windows."""

    def __init__(self, edge: CodecEdge, clock: StageClock) -> None:
        self._edge = edge
        self._clock = clock

    def push(self, codes: Sequence[int]) -> list[Code2WavRequest]:
        return self._noted(self._edge.push(codes))

    def finish(self) -> list[Code2WavRequest]:
        return self._noted(self._edge.finish())

    def _noted(self, windows: list[Code2WavRequest]) -> list[Code2WavRequest]:
        self._clock.windows(len(windows))
        return windows
