"""Places for processes that read untrusted bytes (`limited_process`)."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from omni_server.errors import OverloadedError
from omni_server.media.limited_process import Cancellation

Result = TypeVar("Result")


class ProcessPlaces:
    """A number of processes that may run at the same time. Belongs to one event loop."""

    def __init__(self, number: int, queue_timeout_s: float, busy: str) -> None:
        """`busy` is the message for those who wait longer than `queue_timeout_s` for a place."""
        self._free = asyncio.Semaphore(number)
        # They wait for processes. Not the event loop's pool: this and other work must not delay each other.
        self._threads = ThreadPoolExecutor(number, "processes")
        self._queue_timeout_s = queue_timeout_s
        self._busy = busy

    async def run(self, read: Callable[[Cancellation], Result]) -> Result:
        """Calls `read` in a thread. If the caller gives up, its process is terminated, and its place is free
        when it has ended. Raises `OverloadedError` if no place becomes free in time."""
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await self._free.acquire()
        except TimeoutError:
            raise OverloadedError(self._busy) from None
        cancellation = Cancellation()
        reading = asyncio.get_running_loop().run_in_executor(self._threads, read, cancellation)
        reading.add_done_callback(self._release)
        try:
            return await asyncio.shield(reading)
        finally:
            cancellation.cancel()

    def _release(self, reading: "asyncio.Future[Result]") -> None:
        self._free.release()
        if not reading.cancelled():
            reading.exception()  # retrieved, in case the caller has left
