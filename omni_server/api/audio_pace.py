"""Sends streamed audio at most so far ahead of its playback.

Audio is generated faster than it is played, and a stream normally passes it on at once. That is right while
the connection slows the stream down for a client that does not read. A proxy that takes everything without
waiting, as Ray Serve's does, would hold the whole answer for such a client, and would have taken it already
when the listener interrupts.
"""

import asyncio
import math
from contextlib import suppress

from omni_server.types import SAMPLE_RATE_HZ, AudioDelta, OmniEvent


class AudioPace:
    """The pace of one answer. Playback is assumed to begin with the first audio and to stop where no more has
    been sent. Belongs to one event loop."""

    def __init__(self, max_ahead_s: float, no_wait: asyncio.Event, speed: float = 1.0) -> None:
        """A second of audio is played in 1 / `speed` seconds. Once `no_wait` is set, nothing waits any
        more."""
        self._max_ahead_s = max_ahead_s
        self._no_wait = no_wait
        self._samples_per_s = SAMPLE_RATE_HZ * speed
        self._played_at = 0.0
        """The event loop's time when all audio that has been sent will have been played."""

    async def wait(self, event: OmniEvent, limit_s: float = math.inf) -> bool:
        """Returns True when `event` may be sent: at once, unless it is audio and the listener still has more
        than `max_ahead_s` seconds to play. Returns False after `limit_s` seconds: call it again."""
        if not isinstance(event, AudioDelta):
            return True
        loop = asyncio.get_running_loop()
        delay_s = self._played_at - self._max_ahead_s - loop.time()
        if delay_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(delay_s, limit_s)):
                    await self._no_wait.wait()
            if delay_s > limit_s and not self._no_wait.is_set():
                return False
        self._played_at = max(self._played_at, loop.time()) + event.samples.size / self._samples_per_s
        return True
