"""One response's life: submitted, streamed, and ended exactly once, however it ends."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from omni_server.api.answer_stream import follow
from omni_server.api.errors import logged, unexpected_error
from omni_server.api.realtime.response_plan import ResponsePlan
from omni_server.api.realtime.response_writer import ResponseWriter
from omni_server.api.realtime.wire import CancelReason, StatusDetails, WireUsage
from omni_server.api.state import ServerState
from omni_server.errors import OmniError
from omni_server.generation import Generation
from omni_server.types import AudioDelta, Finished, OmniRequest, TextDelta, ToolCallDelta

logger = logging.getLogger(__name__)


class ResponseRun:
    def __init__(
        self, plan: ResponsePlan, writer: ResponseWriter, state: ServerState, on_end: Callable[["ResponseRun"], None]
    ) -> None:
        """`on_end` is called once, when the last event has been written and everything been released."""
        self.id = plan.id
        self._plan = plan
        self._writer = writer
        self._state = state
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Its `response.done` has been written."""
        return self._writer.is_closed

    @property
    def is_beside(self) -> bool:
        """It is outside of the conversation."""
        return self._plan.conversation_id is None

    def start(self) -> None:
        self._writer.created()
        self._task = asyncio.create_task(self._run(), name=f"realtime response {self.id}")
        # A task that is cancelled before its first step never reaches a `finally` of its own.
        self._task.add_done_callback(lambda _: self._on_end(self))

    @property
    def task(self) -> "asyncio.Task[None]":
        """Ends when everything has been released."""
        assert self._task is not None
        return self._task

    def cancel(self, reason: CancelReason) -> None:
        """Writes the last events at once; the stages are told at the same time and need not have answered."""
        self._writer.close("cancelled", StatusDetails(type="cancelled", reason=reason), WireUsage())
        self.release()

    def release(self) -> "asyncio.Task[None]":
        """Stop without a word, for a client that is gone; returns `task`."""
        self.task.cancel()
        return self.task

    async def _run(self) -> None:
        # A session that waits for its user is not at work, but a response is: a server that stops waits for it.
        with self._state.request_in_flight():
            try:
                await self._answer()
            except OmniError as error:
                logger.info("%s failed: %s", self.id, logged(error))
                self._fail(error)
            except Exception:
                logger.exception("%s failed", self.id)
                self._fail(unexpected_error())

    async def _answer(self) -> None:
        generation = await self._submit()
        try:
            if not self._plan.may_call:
                self._writer.open_message()
            async with aclosing(follow(generation, self._state)) as events:
                async for event in events:
                    match event:
                        case TextDelta(text=text):
                            self._writer.text(text)
                        case ToolCallDelta():
                            self._writer.call(event)
                        case AudioDelta(samples=samples):
                            self._writer.audio(samples)
                        case Finished():
                            self._finish(event)
        finally:
            await generation.aclose()

    async def _submit(self) -> Generation:
        """Raises what `Generator.submit` raises. A conversation that has become too long loses its oldest turns,
        unless the session's `truncation` is "disabled"."""
        generator = self._state.require_generator()

        def shorter(request: OmniRequest) -> OmniRequest | None:
            messages = self._plan.shorter(request.messages)
            return None if messages is None else self._plan.request(messages, generator.model_info)

        return await generator.submit_fitting(self._plan.request(self._plan.messages, generator.model_info), shorter)

    def _finish(self, finished: Finished) -> None:
        usage = WireUsage.of(finished.usage)
        if finished.finish_reason == "length":
            details = StatusDetails(type="incomplete", reason="max_output_tokens")
            self._writer.close("incomplete", details, usage)
        else:
            self._writer.close("completed", None, usage)

    def _fail(self, error: OmniError) -> None:
        self._writer.close("failed", StatusDetails.failed(error), WireUsage())
