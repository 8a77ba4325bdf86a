"""One request: its events, its deadline, its end.

All of it lives in one task, whose end, however it comes, releases the request in every stage.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import msgspec

from omni_server.errors import CorruptDataError, DeadlineExceededError, OmniError
from omni_server.orchestrator.request_graph import RequestGraph
from omni_server.types import Finished, OmniEvent, PromptTokens

logger = logging.getLogger(__name__)


class RequestRun:
    """Implements `omni_server.generation.Generation`."""

    def __init__(
        self,
        graph: RequestGraph,
        *,
        prompt_tokens: PromptTokens,
        deadline_s: float,
        is_logged: bool,
        on_corrupt: Callable[[CorruptDataError], object],
        on_end: Callable[[str], object],
    ) -> None:
        self.request_id = graph.request_id
        self.prompt = prompt_tokens
        self._deadline_s = deadline_s
        self._is_logged = is_logged
        self._on_corrupt = on_corrupt
        self._on_end = on_end
        self._graph = graph
        self._events = graph.events
        self._task: asyncio.Task[None] | None = None
        self._is_over = False  # for the consumer: the last event has been delivered
        self._is_released = False

    # -- the caller's side

    def start(self) -> None:
        """Begin; the deadline counts from here."""
        self._task = asyncio.create_task(self._run(), name=f"request {self.request_id}")
        # A task that is cancelled before its first step never reaches a `finally` of its own.
        self._task.add_done_callback(lambda _: self._release())

    async def __aiter__(self) -> AsyncIterator[OmniEvent]:
        try:
            while not self._is_over:
                event = await self._events.get()
                self._is_over = isinstance(event, Finished | OmniError)
                if isinstance(event, OmniError):
                    raise event
                yield event
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """A consumer that still iterates gets an `OmniError`."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    # -- the request's own task

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._graph.run()
        except* TimeoutError:
            self._events.put_nowait(DeadlineExceededError("the request's deadline has passed"))
        except* OmniError as group:
            error = _first(group)
            if isinstance(error, CorruptDataError):
                logger.error("request %s: %s", self.request_id, error.message)
                self._on_corrupt(error)
            self._events.put_nowait(error)
        except* Exception as group:
            logger.exception("request %s failed", self.request_id, exc_info=group)
            self._events.put_nowait(OmniError("internal error"))
        else:
            self._events.put_nowait(self._finished())
        finally:
            self._release()

    def _release(self) -> None:
        """Embeddings that no stage has been given are dropped; whoever still waits for an event is woken."""
        if self._is_released:
            return
        self._is_released = True
        self._graph.close()
        # Behind another last event nobody reads it.
        self._events.put_nowait(OmniError("the request was ended before it was finished"))
        self._on_end(self.request_id)

    def _finished(self) -> Finished:
        reason, usage = self._graph.result(self.prompt)
        times = self._graph.timeline.times()
        if self._is_logged and logger.isEnabledFor(logging.DEBUG):
            logger.debug("request %s: times %s", self.request_id, msgspec.json.encode(times).decode())
        return Finished(reason, usage, times)


def _first(group: BaseExceptionGroup[OmniError]) -> OmniError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, OmniError)
    return error
