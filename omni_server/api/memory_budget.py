"""Bounds the memory that requests hold at the same time."""

import asyncio

from omni_server.errors import OverloadedError


class MemoryBudget:
    """Bytes that requests acquire and release. First come, first served: small requests do not overtake a
    large one. Belongs to one event loop."""

    def __init__(self, max_bytes: int, timeout_s: float, refusal: str) -> None:
        """`max_bytes` must be at least that of the largest request. `refusal` is the message for a request
        that does not get its bytes within `timeout_s`, which may be 0."""
        self._num_free = max_bytes
        self._timeout_s = timeout_s
        self._refusal = refusal
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()

    async def acquire(self, num_bytes: int) -> None:
        """Raises `OverloadedError` and acquires nothing if too few bytes are released in time."""
        try:
            async with asyncio.timeout(self._timeout_s), self._turn:
                while self._num_free < num_bytes:
                    self._released.clear()
                    await self._released.wait()
                self._num_free -= num_bytes
        except TimeoutError:
            raise OverloadedError(self._refusal) from None

    def release(self, num_bytes: int) -> None:
        self._num_free += num_bytes
        self._released.set()
