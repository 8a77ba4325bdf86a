"""Feeds of all requests on their way to one engine: one message for all that arrive in one turn of the event
loop.

The rows of one step of the source arrive together, so the target gets one message per step rather than one
per request. Sending belongs to no request, so the end of a request cannot interrupt it. A feed either reaches
the stage, which drops it if its request has ended, or is dropped here, and then its request fails: with the
stage if that has died, else by itself.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from omni_server.errors import OmniError
from omni_server.protocol.rows import AddressedFeed, RowsFeed, SharedBlock

logger = logging.getLogger(__name__)


class FeedOutbox:
    """The outbox of one engine. Not thread-safe; bound to one event loop."""

    def __init__(
        self,
        send: Callable[[Sequence[AddressedFeed]], Awaitable[None]],
        drop_block: Callable[[SharedBlock], None] | None,
        fail: Callable[[str], None],
    ) -> None:
        """`send` either hands over all feeds or raises. `drop_block` ends a reference to shared memory; it is
        None if rows do not travel in it. `fail` ends a request with an error, by the engine's id."""
        self._send = send
        self._drop_block = drop_block
        self._fail = fail
        self._waiting: list[AddressedFeed] = []
        self._sending: set[asyncio.Task[None]] = set()

    def put(self, feed: AddressedFeed) -> None:
        """Queues the feed and returns immediately. Feeds are sent in this order."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(feed)

    def drop(self, feed: RowsFeed) -> None:
        """Ends the reference of a feed that will not be sent."""
        if (block := feed.shared_block) is not None and self._drop_block is not None:
            self._drop_block(block)

    def _flush(self) -> None:
        feeds, self._waiting = self._waiting, []
        # Tasks start in the order of their creation, and the message is with the socket before `send` first
        # waits.
        task = asyncio.create_task(self._deliver(feeds))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _deliver(self, feeds: Sequence[AddressedFeed]) -> None:
        try:
            await self._send(feeds)
        except BaseException as exc:
            for _, feed in feeds:
                self.drop(feed)
            if isinstance(exc, OmniError):
                # Every request of that stage learns of its death from the stage itself.
                logger.debug("%d feeds could not be sent: %s", len(feeds), exc)
                return
            for request_id in {request_id for request_id, _ in feeds}:
                self._fail(request_id)
            if not isinstance(exc, Exception):
                raise
            logger.exception("%d feeds could not be sent", len(feeds))
