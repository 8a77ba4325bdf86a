"""Bounds the memory of uploaded media."""

import asyncio
from collections.abc import Callable

from omni_server.errors import OverloadedError


class MediaRoom:
    """Bounds the memory of decoded media in progress. Each stays in memory until its request ends, which may
    take minutes; the request queue alone would admit a thousand of them."""

    def __init__(self, kind: str, max_size: int, timeout_s: float) -> None:
        """`kind` is for errors. `max_size`, in samples or pixels, must be at least that of the largest
        request; `timeout_s` is the longest wait."""
        self._kind = kind
        self._max_size = max_size
        self._timeout_s = timeout_s
        self._size = 0
        self._released = asyncio.Event()

    async def take(self, size: int) -> Callable[[], None]:
        """Reserves room; returns its release callback, to call once. Raises `OverloadedError` on timeout."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while self._size + size > self._max_size:
                    self._released.clear()
                    await self._released.wait()
        except TimeoutError:
            raise OverloadedError(f"The server is busy with the {self._kind} of other requests.") from None
        self._size += size

        def give_back() -> None:
            self._size -= size
            self._released.set()

        return give_back
