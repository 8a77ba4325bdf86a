"""The rows of one request on their way from one autoregressive stage to the next.

Everything here is synchronous: rows are passed in as they arrive and are sent on, kept or dropped before the
call returns, so that cancelling a task cannot lose a reference to shared memory.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import takewhile

from omni_server.engine.feed_outbox import FeedOutbox
from omni_server.family import MEDIA_ROW, TextRows
from omni_server.family.speech_text import SpeechPrompt
from omni_server.protocol.rows import ComposedSegment, RowsFeed, RowsPayload, TextSegment


class RowFeeder:
    """Forwards rows from `take` to `finish`. Keeps them until `connect` sets the target, and drops them after
    `close`."""

    has_row_of_last_token = False
    """Whether the last generated token may have a row. The source sends the rows of what it computes, and it
    does not compute its last token."""

    def __init__(self, drop: Callable[[RowsFeed], None], *, num_first_rows: int, is_limited: bool) -> None:
        """`drop` ends the reference of a feed that no engine of the target will get. `num_first_rows` rows
        precede the row of the first generated token. With `is_limited`, rows of generated tokens may be
        spoken only as far as `allow` permits."""
        self._drop = drop
        self._outbox: FeedOutbox | None = None
        self._num_first_rows = num_first_rows
        self._limit: int | None = num_first_rows if is_limited else None
        self._engine_id: str | None = None
        self._kept: list[RowsFeed] = []
        self._is_closed = False
        self.has_rows = asyncio.Event()
        """Set when the target can be given the request."""
        self.num_generated_rows = 0
        """Rows of generated tokens that have arrived."""

    def take(self, payload: RowsPayload) -> None:
        """Accepts new rows."""
        self.num_generated_rows = max(self.num_generated_rows, payload.num_generated_rows)
        self.has_rows.set()
        self._feed(RowsFeed(payload, num_released=self._limit))

    def speak(self, token_ids: Sequence[int]) -> None:
        """Accepts generated tokens. Their rows come from the source."""

    def allow(self, num_tokens: int) -> None:
        """Allows `num_tokens` generated tokens to be spoken."""
        limit = self._num_first_rows + num_tokens
        if limit != self._limit:
            self._limit = limit
            self._feed(RowsFeed(num_released=limit))

    def finish(self, num_tokens: int) -> None:
        """Ends the speech after `num_tokens` generated tokens, whose rows have arrived."""
        self._feed(RowsFeed(num_released=None, final_length=self._num_first_rows + num_tokens))

    def connect(self, outbox: FeedOutbox, engine_id: str) -> None:
        """An engine of the target stage, whose outbox this is, has accepted the request, under this id."""
        self._outbox, self._engine_id = outbox, engine_id
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
            self._drop(feed)
        elif self._outbox is None or self._engine_id is None:
            self._kept.append(feed)
        else:
            self._outbox.put((self._engine_id, feed))


class TextRowFeeder(RowFeeder):
    """Feeds a target that looks up the rows of text: composes ids and the source's rows of media.

    What may not be spoken yet is not sent. The target can be given the request with the first rows of media:
    kept here, they would occupy the queue, and the source may need its slots for the rest of them. Without
    media, the first token to speak comes first.
    """

    has_row_of_last_token = True

    def __init__(self, drop: Callable[[RowsFeed], None], rows: TextRows, *, is_limited: bool) -> None:
        """See `RowFeeder`. `rows` are those of the target's prompt."""
        super().__init__(drop, num_first_rows=len(rows.row_ids), is_limited=is_limited)
        self._ids = list(rows.row_ids)  # of all rows, those of generated tokens included
        self._tail_ids = rows.tail_ids  # empty once sent
        self._num_fed = 0

    def take(self, payload: RowsPayload) -> None:
        text: list[TextSegment] = []
        for segment in payload.segments:
            text += self._next_text(segment.first_position)
            self._num_fed = segment.first_position + segment.num_rows
        self.has_rows.set()
        self._feed_text(payload, text)

    def speak(self, token_ids: Sequence[int]) -> None:
        self._ids += token_ids
        self._feed_text()

    def allow(self, num_tokens: int) -> None:
        self._limit = self._num_first_rows + num_tokens
        self._feed_text()

    def finish(self, num_tokens: int) -> None:
        self._limit = final_length = self._num_first_rows + num_tokens
        self._feed_text(final_length=final_length)

    def _feed_text(
        self,
        payload: RowsPayload | None = None,
        text: Sequence[TextSegment] = (),
        *,
        final_length: int | None = None,
    ) -> None:
        """Feeds what is given, and the ids that may follow."""
        text = (*text, *self._next_text(len(self._ids) if self._limit is None else self._limit))
        if MEDIA_ROW not in self._ids[self._num_fed :]:
            self.num_generated_rows = len(self._ids) - self._num_first_rows
        if payload is None and not text and final_length is None:
            return
        self._feed(RowsFeed(payload, final_length=final_length, text=text, tail_ids=self._tail_ids))
        self._tail_ids = ()
        if self._num_fed > self._num_first_rows:
            self.has_rows.set()

    def _next_text(self, end: int) -> tuple[TextSegment, ...]:
        """Takes the ids of the next rows, up to `end` or to the next row of the source."""
        first = self._num_fed
        ids = tuple(takewhile(MEDIA_ROW.__ne__, self._ids[first:end]))
        self._num_fed += len(ids)
        return (TextSegment(first, ids),) if ids else ()


class SpeechTextFeeder(RowFeeder):
    """Feeds an entry that reads text: its prompt, then the ids of the rows of generated positions."""

    def __init__(
        self, drop: Callable[[RowsFeed], None], prompt: SpeechPrompt, on_close: Callable[[], None]
    ) -> None:
        """For `drop`, see `RowFeeder`. `on_close`: no more text is needed."""
        super().__init__(drop, num_first_rows=len(prompt.token_ids), is_limited=False)
        self._on_close = on_close
        composed = (ComposedSegment(0, len(prompt.token_ids), prompt.rows),)
        self._feed(RowsFeed(composed=composed, tail_ids=prompt.tail_ids))
        self.speak(prompt.text_ids)
        self.has_rows.set()

    def speak(self, token_ids: Sequence[int]) -> None:
        if token_ids:
            first = self._num_first_rows + self.num_generated_rows
            self.num_generated_rows += len(token_ids)
            self._feed(RowsFeed(text=(TextSegment(first, tuple(token_ids)),)))

    def close(self) -> None:
        super().close()
        self._on_close()
