"""When a request passed which stage."""

import time
from collections.abc import Callable

from omni_server.types import StageTimes, WindowTimes


class StageClock:
    """Notes times in seconds since its creation."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._ready: list[float] = []  # of each window
        self._sent: list[float] = []
        self._computed: list[float] = []

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
        for _ in range(count):
            self._ready.append(self._note("window"))

    def window_sent(self) -> None:
        """The next window has been sent to code2wav."""
        self._sent.append(self._now())

    def window_computed(self) -> None:
        """The next window's sound has come back."""
        self._computed.append(self._now())

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
            num_windows=len(self._ready),
            windows=tuple(map(WindowTimes, self._ready, self._sent, self._computed)),
        )

    def _note(self, what: str) -> float:
        now = self._now()
        self._first.setdefault(what, now)
        self._last[what] = now
        return now

    def _now(self) -> float:
        return self._clock() - self._began
