"""Bounds the generated output that clients have not read yet, per answer and for all answers together.

There is no backpressure on generation: with a slow client, the request would keep its slot in every stage.
Clients that play audio as they receive it read at the speed of speech, many times slower than generation, so
the backlog may be as large as a whole answer. A client that falls further behind loses its answer, without
any effect on other clients.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from omni_server.errors import InvalidRequestError
from omni_server.types import AudioDelta, OmniEvent, TextDelta, ToolCallDelta
from omni_server.types.images import ImageDone, PartialImage

logger = logging.getLogger(__name__)

_EVENT_BYTES = 256
"""Per event, without its payload."""
_LOGPROB_BYTES = 256
"""Per sampled or alternative token, including its text."""

ChoiceEvent = tuple[int, OmniEvent]
"""Index of the choice, and its event."""


class UnsentBudget:
    """Counts unsent bytes of all answers. Belongs to one event loop."""

    def __init__(
        self, max_bytes: int, max_total_bytes: int, count_dropped: Callable[[], None] = lambda: None
    ) -> None:
        """`max_bytes` bounds each answer. If all together exceed `max_total_bytes`, the largest is dropped.
        `count_dropped` is called for each dropped answer."""
        self.max_bytes = max_bytes
        self.count_dropped = count_dropped
        self.queues: set[AnswerQueue] = set()
        self._max_total_bytes = max_total_bytes
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if num_bytes > 0 and self.num_bytes > self._max_total_bytes:
            max(self.queues, key=lambda queue: queue.num_bytes).drop()


class AnswerQueue:
    """Queue of one answer's events from the stages to its client; must be closed."""

    def __init__(self, budget: UnsentBudget, answer_id: str, heartbeat_s: float | None) -> None:
        """The reader waits at most `heartbeat_s` seconds at a time."""
        self._budget = budget
        self._answer_id = answer_id
        self._heartbeat_s = heartbeat_s
        self._items: deque[ChoiceEvent | BaseException] = deque()
        self._woken = asyncio.Event()
        self.num_bytes = 0
        self.is_dropped = False
        """Drops later events."""
        budget.queues.add(self)

    def put(self, index: int, event: OmniEvent) -> None:
        """Adds an event; may drop the answer."""
        if self.is_dropped:
            return
        self._items.append((index, event))
        self._change(size_of(event))
        if self.num_bytes > self._budget.max_bytes:
            self.drop()
        self.wake()

    def put_error(self, error: BaseException) -> None:
        """Adds the final error."""
        if not self.is_dropped:
            self._items.append(error)
            self.wake()

    async def get(self) -> ChoiceEvent | BaseException | None:
        """Returns the next item, or None after a heartbeat's time or if `wake` ended the wait."""
        if not self._items:
            self._woken.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s):
                    await self._woken.wait()
        if not self._items:
            return None
        item = self._items.popleft()
        if isinstance(item, tuple) and not self.is_dropped:
            self._change(-size_of(item[1]))
        return item

    def wake(self) -> None:
        """Ends the reader's wait for the next item, if any."""
        self._woken.set()

    def drop(self) -> None:
        """Discards the backlog; the reader gets an error."""
        if self.is_dropped:
            return
        error = InvalidRequestError(
            f"The client reads too slowly: {self.num_bytes} bytes of its answer wait to be sent, "
            "and the server does not keep them any longer.",
            code="client_too_slow",
        )
        logger.warning(
            "%s is dropped: its client has left %d bytes of it untaken", self._answer_id, self.num_bytes
        )
        self._budget.count_dropped()
        self.is_dropped = True
        self.close()
        self._items.append(error)
        self.wake()

    def close(self) -> None:
        """Discards the backlog. Idempotent."""
        self._budget.queues.discard(self)
        self._items.clear()
        self._change(-self.num_bytes)

    def _change(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._budget.add(num_bytes)


def size_of(event: OmniEvent) -> int:
    """Approximate memory size."""
    match event:
        case AudioDelta():
            return _EVENT_BYTES + event.samples.nbytes
        case ImageDone() | PartialImage():
            return _EVENT_BYTES + event.pixels.nbytes
        case TextDelta():
            num_logprobs = sum(1 + len(token.top) for token in event.logprobs)
            return _EVENT_BYTES + len(event.text) + _LOGPROB_BYTES * num_logprobs
        case ToolCallDelta():
            return _EVENT_BYTES + len(event.arguments)
    return _EVENT_BYTES
