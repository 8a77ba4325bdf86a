"""Bounds the generated output that clients have not read yet, per answer and for all answers together.

There is no backpressure on generation: with a slow client, the request would keep its slot in every stage.
Clients that play audio as they receive it read at the speed of speech, many times slower than generation, so
the backlog may be as large as a whole answer. A client that falls further behind loses its answer, without
any effect on other clients.
"""

from collections.abc import Callable
from typing import Protocol

from omni_server.types import AudioDelta, OmniEvent, TextDelta, ToolCallDelta
from omni_server.types.images import ImageDone, PartialImage

_EVENT_BYTES = 256
"""Per event, without its payload."""
_LOGPROB_BYTES = 256
"""Per sampled or alternative token, including its text."""


class Answer(Protocol):
    def drop(self, num_bytes: int) -> None:
        """Discards its backlog of `num_bytes` and ends it. Must call `UnsentBudget.remove`."""
        ...


class UnsentBudget:
    """Counts unsent bytes of all answers. Belongs to one event loop."""

    def __init__(
        self, max_bytes: int, max_total_bytes: int, count_dropped: Callable[[], None] = lambda: None
    ) -> None:
        """`max_bytes` bounds each answer. If all together exceed `max_total_bytes`, the largest is dropped.
        `count_dropped` is called for each dropped answer."""
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._count_dropped = count_dropped
        self._of_answer: dict[Answer, int] = {}
        self.num_bytes = 0

    def add(self, answer: Answer, num_bytes: int) -> None:
        """Adds `num_bytes`, which may be negative, to what is unsent of `answer`. May drop an answer."""
        self.num_bytes += num_bytes
        self._of_answer[answer] = self._of_answer.get(answer, 0) + num_bytes
        if num_bytes > 0 and self.num_bytes > self._max_total_bytes:
            self._drop(max(self._of_answer, key=self._of_answer.__getitem__))
        if self._of_answer.get(answer, 0) > self._max_bytes:
            self._drop(answer)

    def remove(self, answer: Answer) -> None:
        """Nothing of `answer` is unsent any more. Idempotent."""
        self.num_bytes -= self._of_answer.pop(answer, 0)

    def _drop(self, answer: Answer) -> None:
        self._count_dropped()
        answer.drop(self._of_answer[answer])


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
