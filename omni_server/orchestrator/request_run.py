"""One request: its events, its deadline and its end.

Everything runs in one task. When that task ends, for any reason, the request is released in every stage.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec

from omni_server.errors import CorruptDataError, DeadlineExceededError, OmniError, first_leaf
from omni_server.orchestrator.request_graph import RequestGraph
from omni_server.types import Finished, OmniEvent, PromptTokens

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class RequestRun:
    """Implements `omni_server.generation.Generation`."""

    graph: RequestGraph
    prompt: PromptTokens
    deadline_s: float
    is_logged: bool
    on_corrupt: Callable[[CorruptDataError], object]
    on_end: Callable[[str], object]

    def __post_init__(self) -> None:
        self.request_id = self.graph.request_id
        self.began = self.graph.timeline.began
        self._task: asyncio.Task[None] | None = None
        self._is_over = False  # for the consumer: the last event has been delivered
        self._is_released = False

    # -- the caller's side

    def start(self) -> None:
        """Starts the request; the deadline counts from here."""
        self._task = asyncio.create_task(self._run(), name=f"request {self.request_id}")
        # A task that is cancelled before its first step never reaches a `finally` of its own.
        self._task.add_done_callback(lambda _: self._release())

    async def __aiter__(self) -> AsyncIterator[OmniEvent]:
        try:
            while not self._is_over:
                event = await self.graph.events.get()
                self._is_over = isinstance(event, Finished | OmniError)
                if isinstance(event, OmniError):
                    raise event
                yield event
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Ends the request. A consumer that is still iterating gets an `OmniError`."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    # -- the request's own task

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(self.deadline_s):
                await self.graph.run()
        except* TimeoutError:
            self.graph.events.put_nowait(DeadlineExceededError("the request's deadline has passed"))
        except* OmniError as group:
            error = first_leaf(group)
            if isinstance(error, CorruptDataError):
                logger.error("request %s: %s", self.request_id, error.message)
                self.on_corrupt(error)
            self.graph.events.put_nowait(error)
        except* Exception as group:
            logger.exception("request %s failed", self.request_id, exc_info=group)
            self.graph.events.put_nowait(OmniError("internal error"))
        else:
            self.graph.events.put_nowait(self._finished())
        finally:
            self._release()

    def _release(self) -> None:
        """Drops embeddings that no stage has received, and wakes a consumer that is waiting for an event."""
        if self._is_released:
            return
        self._is_released = True
        self.graph.close()
        # Never read if another final event precedes it.
        self.graph.events.put_nowait(OmniError("the request was ended before it was finished"))
        self.on_end(self.request_id)

    def _finished(self) -> Finished:
        reason, usage = self.graph.result(self.prompt)
        times = self.graph.timeline.times()
        if self.is_logged and logger.isEnabledFor(logging.DEBUG):
            logger.debug("request %s: times %s", self.request_id, msgspec.json.encode(times).decode())
        return Finished(reason, usage, times)
