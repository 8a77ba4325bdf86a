"""What has been generated and not yet taken by its clients: bounded per answer, and for all answers together.

Generation does not wait for a client that reads slowly: it would keep its place in every stage for as long as
that takes. Clients that play what they get read at the speed of speech, many times slower than it is made, so
what waits for one may be as much as a whole answer. A client that falls further behind loses its answer, and
nobody else notices.
"""

import logging
from collections.abc import Callable

from omni_server.errors import InvalidRequestError
from omni_server.types import AudioDelta, ImageDone, OmniEvent, TextDelta, ToolCallDelta

logger = logging.getLogger(__name__)

_EVENT_BYTES = 256
"""Of an event without its payload."""
_LOGPROB_BYTES = 256
"""Of a token that was sampled, or that might have been, with its text."""


class UnsentBudget:
    """Counts bytes for all answers of a server. Belongs to one event loop."""

    def __init__(
        self, max_bytes: int, max_total_bytes: int, count_dropped: Callable[[], None] = lambda: None
    ) -> None:
        """`max_bytes` bounds each answer. Where all together exceed `max_total_bytes`, the largest is
        dropped. `count_dropped` is called for each answer that is."""
        self.max_bytes = max_bytes
        self.count_dropped = count_dropped
        self._max_total_bytes = max_total_bytes
        self._num_bytes = 0
        self._backlogs: set[Backlog] = set()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def open(self, answer_id: str, on_drop: Callable[[InvalidRequestError], None]) -> "Backlog":
        """For one answer; its owner closes it. `on_drop` is called at most once, when the answer has to be
        dropped, with the error for its client; all that waits must be released then."""
        backlog = Backlog(self, answer_id, on_drop)
        self._backlogs.add(backlog)
        return backlog

    def forget(self, backlog: "Backlog") -> None:
        self._backlogs.discard(backlog)

    def add(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if num_bytes > 0 and self._num_bytes > self._max_total_bytes:
            max(self._backlogs, key=lambda backlog: backlog.num_bytes).drop()


class Backlog:
    """Events of one answer between the stages and its client."""

    def __init__(
        self, budget: UnsentBudget, answer_id: str, on_drop: Callable[[InvalidRequestError], None]
    ) -> None:
        self._budget = budget
        self._answer_id = answer_id
        self._on_drop = on_drop
        self.num_bytes = 0
        self.error: InvalidRequestError | None = None
        """Why nothing more is taken; None while it is."""

    def put(self, event: OmniEvent) -> None:
        """`event` waits from now on, unless the answer is dropped, perhaps because of it: then
        `error` is set."""
        if self.error is not None:
            return
        self._change(size_of(event))
        if self.num_bytes > self._budget.max_bytes:
            self.drop()

    def taken(self, event: OmniEvent) -> None:
        """`event`, which was put before, no longer waits."""
        if self.error is None:
            self._change(-size_of(event))

    def drop(self) -> None:
        if self.error is not None:
            return
        self.error = InvalidRequestError(
            f"The client reads too slowly: {self.num_bytes} bytes of its answer wait to be sent, "
            "and the server does not keep them any longer.",
            code="client_too_slow",
        )
        logger.warning(
            "%s is dropped: its client has left %d bytes of it untaken", self._answer_id, self.num_bytes
        )
        self._budget.count_dropped()
        self.close()
        self._on_drop(self.error)

    def close(self) -> None:
        """Nothing waits any more; may be called again."""
        self._budget.forget(self)
        self._change(-self.num_bytes)

    def _change(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._budget.add(num_bytes)


def size_of(event: OmniEvent) -> int:
    """Bytes of memory, roughly."""
    match event:
        case AudioDelta():
            return _EVENT_BYTES + event.samples.nbytes
        case ImageDone():
            return _EVENT_BYTES + event.pixels.nbytes
        case TextDelta():
            num_logprobs = sum(1 + len(token.top) for token in event.logprobs)
            return _EVENT_BYTES + len(event.text) + _LOGPROB_BYTES * num_logprobs
        case ToolCallDelta():
            return _EVENT_BYTES + len(event.arguments)
    return _EVENT_BYTES
