"""One request on its way through the stages that it needs.

The stages form a tree from the entry to the outputs. Each stage of the tree is a task, and so is the stream
of windows that becomes audio. Data that crosses an edge is handed on synchronously, when it arrives.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

import msgspec

from omni_server.engine.engine_handle import EngineHandle, HandleT, Stage
from omni_server.errors import CorruptDataError, DeadlineExceededError, OmniError, first_leaf
from omni_server.generation import Deliver
from omni_server.orchestrator.fair_share import FairShareTicket
from omni_server.orchestrator.request_timeline import RequestTimeline
from omni_server.types import Finished, FinishReason, OmniEvent, PromptTokens, Usage

logger = logging.getLogger(__name__)

_CATCH_UP_TURNS = 12
"""Turns of the event loop that a spoken request waits for others that arrived at the same moment. A request
over a kept connection is about 6 turns ahead of those over new ones, which must be accepted first. Each turn
may read the prompts of all of them. They then reach the entry together, and their speech stays together
(`stages.runtime.batching_delay`). Text-only requests gain nothing from this and continue immediately."""


class GraphTask(Protocol):
    """A part of the tree."""

    async def run(self) -> None:
        """Returns when the part has done all its work. Raises `OmniError`."""
        ...


TaskT = TypeVar("TaskT", bound=GraphTask)


class RequestRun:
    """Implements `omni_server.generation.Generation`. Filled by `add`, then started. `close` must follow if
    it is not; after that, the request is released in every stage when its task ends, for any reason."""

    prompt: PromptTokens

    def __init__(
        self,
        request_id: str,
        ticket: FairShareTicket,
        deliver: Deliver,
        pinned_engine: EngineHandle | None = None,
    ) -> None:
        """`pinned_engine`: the engine to choose in its stage."""
        self.request_id = request_id
        self.ticket = ticket
        self.timeline = RequestTimeline()
        self.began = self.timeline.began
        self.on_close: list[Callable[[], object]] = []
        self.finish_reason: FinishReason = "stop"
        """Why the text ended."""
        self.is_speech_cut = False
        """Whether the speech reached its stage's limit."""
        self.num_text_tokens = 0
        self.num_cached_tokens = 0
        """Prompt tokens served from the prefix cache."""
        self.num_frames = 0
        """Frames that became audio."""
        self.num_image_tokens = 0
        """Of the generated image."""
        self._deliver = deliver
        self._pinned_engine = pinned_engine
        self._bound: list[EngineHandle] = []
        self._tasks: list[GraphTask] = []
        self._task: asyncio.Task[None] | None = None
        self._on_end: Callable[[str], object] | None = None
        self._last_event: OmniEvent | OmniError = OmniError("the request was ended before it was finished")
        self._is_closed = False

    def add(self, task: TaskT) -> TaskT:
        """Consumers must be added before their sources, and the entry last."""
        self._tasks.append(task)
        return task

    def start(
        self,
        prompt: PromptTokens,
        *,
        deadline_s: float,
        is_logged: bool,
        on_corrupt: Callable[[CorruptDataError], object],
        on_end: Callable[[str], object],
    ) -> None:
        """Starts the tasks; the deadline counts from here. Calls `on_end` once, with the request's id."""
        self.prompt = prompt
        self._on_end = on_end
        work = self._run(deadline_s, is_logged=is_logged, on_corrupt=on_corrupt)
        self._task = asyncio.create_task(work, name=f"request {self.request_id}")
        # A task that is cancelled before its first step never reaches a `finally` of its own.
        self._task.add_done_callback(lambda _: self.close())

    def cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()

    async def aclose(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    # -- the request's own tasks

    def choose(self, stage: Stage[HandleT]) -> HandleT:
        """Binds the request to an engine of the stage, until `leave` or `close`."""
        handle = stage.choose(self._pinned_engine)
        self._bound.append(handle)
        if len(stage.handles) > 1:
            self.timeline.mark_replica(stage.name, handle.number)
        return handle

    def leave(self, handle: EngineHandle) -> None:
        """The request no longer needs the engine. Harmless if it has left already."""
        if handle in self._bound:
            self._bound.remove(handle)
            handle.leave()

    def add_prompt_text(self, num_tokens: int) -> None:
        """Counts text that came after the start."""
        text, total = self.prompt.text + num_tokens, self.prompt.total + num_tokens
        self.prompt = replace(self.prompt, text=text, total=total)

    def emit(self, event: OmniEvent) -> None:
        """Delivers an event; drops one that comes after the last."""
        self.ticket.begin()
        if not self._is_closed:
            self._deliver(event)

    def close(self) -> None:
        """Drops embeddings that have not been handed on or that arrive later, leaves all engines, and
        delivers the last event if the request was started. Harmless if already closed."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.ticket.end()
            for handle in tuple(self._bound):
                self.leave(handle)
            for call in self.on_close:
                call()
            # These refer to the request. A prompt with its media must not wait for the garbage collector.
            self._tasks.clear()
            self.on_close.clear()
            if self._on_end is not None:
                self._on_end(self.request_id)
        finally:  # the reader waits for it
            if self._task is not None:
                self._deliver(self._last_event)

    async def _run(
        self, deadline_s: float, *, is_logged: bool, on_corrupt: Callable[[CorruptDataError], object]
    ) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await self._run_tasks()
        except* TimeoutError:
            self._last_event = DeadlineExceededError("the request's deadline has passed")
        except* OmniError as group:
            error = first_leaf(group)
            if isinstance(error, CorruptDataError):
                logger.error("request %s: %s", self.request_id, error.message)
                on_corrupt(error)
            self._last_event = error
        except* Exception as group:
            logger.exception("request %s failed", self.request_id, exc_info=group)
            self._last_event = OmniError("internal error")
        else:
            finished = self._finished()
            if is_logged and logger.isEnabledFor(logging.DEBUG):
                times = msgspec.json.encode(finished.times).decode()
                logger.debug("request %s: times %s", self.request_id, times)
            self._last_event = finished
        finally:
            self.close()

    async def _run_tasks(self) -> None:
        """Raises a group of `OmniError`."""
        *others, entry = self._tasks
        async with asyncio.TaskGroup() as group:
            for task in others:
                group.create_task(task.run())
            if others:
                for _ in range(_CATCH_UP_TURNS):
                    await asyncio.sleep(0)
            group.create_task(entry.run())

    def _finished(self) -> Finished:
        """The end of a successful request. Its answer is incomplete if any stage hit its limit."""
        prompt = replace(self.prompt, cached=self.num_cached_tokens)
        usage = Usage(prompt, self.num_text_tokens, self.num_frames, self.num_image_tokens)
        reason = "length" if self.is_speech_cut else self.finish_reason
        return Finished(reason, usage, self.timeline.times())
