"""How much decoded sound the recordings that are being transcribed may take together."""

import asyncio
from collections.abc import Callable

from omni_server.errors import OverloadedError


class RecordingRoom:
    """A recording is kept until its last piece has been heard, which may take minutes; the queue of requests alone
    would let a thousand of them be kept."""

    def __init__(self, max_samples: int, timeout_s: float) -> None:
        """`max_samples` must be at least those of the longest recording. One waits for room for `timeout_s`."""
        self._max_samples = max_samples
        self._timeout_s = timeout_s
        self._num_samples = 0
        self._released = asyncio.Event()

    async def take(self, num_samples: int) -> Callable[[], None]:
        """Returns what gives the room back, to be called once. Raises `OverloadedError` if none became free."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while self._num_samples + num_samples > self._max_samples:
                    self._released.clear()
                    await self._released.wait()
        except TimeoutError:
            raise OverloadedError("The server is busy with the recordings of other requests.") from None
        self._num_samples += num_samples

        def give_back() -> None:
            self._num_samples -= num_samples
            self._released.set()

        return give_back
