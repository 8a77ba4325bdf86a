"""The rows of one request on their way from one autoregressive stage to the next.

Everything here is synchronous: rows are passed in as they arrive and are sent on, kept or dropped before the
call returns, so that cancelling a task cannot lose a reference to shared memory.
"""

import asyncio

from omni_server.engine.feed_outbox import FeedOutbox
from omni_server.protocol.rows import RowsFeed, RowsPayload


class RowFeeder:
    """Forwards rows from `take` to `finish`. Keeps them until `connect` sets the target, and drops them after
    `close`."""

    def __init__(self, outbox: FeedOutbox, *, num_first_rows: int, is_limited: bool) -> None:
        """`outbox` is the target engine's. `num_first_rows` rows precede the row of the first generated
        token. With `is_limited`, rows of generated tokens may be spoken only as far as `allow` permits."""
        self._outbox = outbox
        self._num_first_rows = num_first_rows
        self._limit: int | None = num_first_rows if is_limited else None
        self._engine_id: str | None = None
        self._kept: list[RowsFeed] = []
        self._is_closed = False
        self.has_rows = asyncio.Event()
        """Set when the first rows arrive."""
        self.num_generated_rows = 0
        """Rows of generated tokens that have arrived."""

    def take(self, payload: RowsPayload) -> None:
        """Accepts new rows."""
        self.num_generated_rows = max(self.num_generated_rows, payload.num_generated_rows)
        self.has_rows.set()
        self._feed(RowsFeed(payload, num_released=self._limit))

    def allow(self, num_tokens: int) -> None:
        """Allows `num_tokens` generated tokens to be spoken."""
        limit = self._num_first_rows + num_tokens
        if limit != self._limit:
            self._limit = limit
            self._feed(RowsFeed(num_released=limit))

    def finish(self, num_tokens: int) -> None:
        """Ends the speech after `num_tokens` generated tokens, whose rows have arrived."""
        self._feed(RowsFeed(num_released=None, final_length=self._num_first_rows + num_tokens))

    def connect(self, engine_id: str) -> None:
        """The target stage has accepted the request, under this id."""
        self._engine_id = engine_id
        self._flush()

    def close(self) -> None:
        """Drops all rows from now on. Harmless if already closed."""
        self._is_closed = True
        self._flush()

    def _flush(self) -> None:
        kept, self._kept = self._kept, []
        for feed in kept:
            self._feed(feed)

    def _feed(self, feed: RowsFeed) -> None:
        if self._is_closed:
            self._outbox.drop(feed)
        elif self._engine_id is None:
            self._kept.append(feed)
        else:
            self._outbox.put((self._engine_id, feed))
