"""HTTP connections whose client takes nothing of what it is sent are cut off."""

import asyncio
import fcntl
import logging
import termios
from array import array
from typing import cast

logger = logging.getLogger(__name__)


class StallWatch(asyncio.Protocol):
    """Goes in front of uvicorn's HTTP protocol.

    Above 64 KiB that the client has not taken, the transport pauses writing, and uvicorn lets the application wait
    for as long as that lasts: a request would keep its place for ever. No byte is added meanwhile, so if what is left
    does not shrink for `stall_timeout_s`, the client takes nothing. Its connection is aborted, and the application
    sees a client that has left. A client that reads slowly is served to the end.
    """

    stall_timeout_s: float
    """Clients are cut off after once to twice this time."""
    _transport: asyncio.Transport
    _check: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        self._check = loop.call_later(self.stall_timeout_s, self._check_progress, self._num_left())

    def _stop_watching(self) -> None:
        if self._check is not None:
            self._check.cancel()
            self._check = None

    def _num_left(self) -> int:
        """Bytes, those included that the kernel has not delivered: it may hold megabytes, and takes no more of ours
        until a good part of them is gone, for which a client that plays as it reads needs its time."""
        queued = array("i", [0])
        fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self._transport.get_write_buffer_size() + queued[0]

    def _check_progress(self, num_before: int) -> None:
        if self._num_left() < num_before:
            self._watch()
            return
        client = self._transport.get_extra_info("peername")
        logger.warning("the client %s took nothing for %g s and is cut off", client, self.stall_timeout_s)
        self._transport.abort()
