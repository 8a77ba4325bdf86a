"""State that all requests share: the generator, and whether the server accepts, drains or aborts."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from omni_server import __version__
from omni_server.api.access_log import log_session_answer
from omni_server.api.audio_pace import AudioPace
from omni_server.api.config import ApiConfig
from omni_server.api.request_record import AnswerRecord, RequestRecord, current_request
from omni_server.api.server_metrics import ServerMetrics
from omni_server.api.unsent import UnsentBudget
from omni_server.errors import InvalidRequestError, OmniError, OverloadedError
from omni_server.generation import Generation, Generator
from omni_server.types import ChatMessage, ModelInfo, OmniEvent, OmniRequest, Task

if TYPE_CHECKING:
    from omni_server.api.otel import OtelTracer

Shorter = Callable[[OmniRequest], OmniRequest | None]


class ServerState:
    """Belongs to one event loop. `run_server` writes it; the routes read it."""

    def __init__(self, generator: Generator | None = None, tracer: "OtelTracer | None" = None) -> None:
        self.generator = generator
        """None while the model is loading."""
        self.tracer = tracer
        """None if requests are not traced."""
        self.metrics = ServerMetrics(__version__)
        self.unsent = UnsentBudget(ApiConfig.max_unsent_bytes, ApiConfig.max_total_unsent_bytes)
        """Budget of all running answers."""
        self.max_audio_ahead_s = ApiConfig.max_audio_ahead_s
        self.draining = asyncio.Event()
        """Set once the server has been asked to stop."""
        self.abort_error: OmniError | None = None
        """Set by `abort`."""
        self.on_abort: set[Callable[[], object]] = set()
        """Called by `abort`."""
        self.is_ending = asyncio.Event()
        """Set by `drain` and `abort`: no audio is held back any more."""
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def unavailability(self) -> OverloadedError | None:
        """Why the server cannot serve requests now, or None."""
        if self.draining.is_set():
            return OverloadedError("The server is shutting down.", code="server_shutting_down")
        if self.generator is None:
            return OverloadedError("The model is still loading.", code="model_not_ready")
        if not self.generator.is_alive():
            return OverloadedError("A stage of the server has died for good.", code="engine_dead")
        if not self.generator.is_ready():
            return OverloadedError("The model is still warming up.", code="model_not_ready")
        return None

    def require_generator(self) -> "ObservedGenerator":
        """Returns the generator for immediate use; counts and logs its answers.

        Raises `OverloadedError` if `unavailability` has a reason.
        """
        reason = self.unavailability()
        if reason is not None:
            raise reason
        assert self.generator is not None
        return ObservedGenerator(self.generator, self)

    def require_all_stages(self) -> None:
        """Raises `OverloadedError` like `require_generator`, and `StageDownError` while a stage is down.
        Requests that do not need that stage are still served."""
        self.require_generator()
        assert self.generator is not None
        down = self.generator.stage_down()
        if down is not None:
            raise down

    def audio_pace(self, speed: float = 1.0) -> AudioPace | None:
        """Returns the pace of a new answer that is streamed; None if its audio is sent at once."""
        if self.max_audio_ahead_s is None or self.draining.is_set():
            return None
        return AudioPace(self.max_audio_ahead_s, self.is_ending, speed)

    @contextmanager
    def request_in_flight(self) -> Iterator[None]:
        """Counts a request as running inside the block."""
        self._num_in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Returns when no request is running."""
        await self._idle.wait()

    def drain(self) -> None:
        """The server has been asked to stop: refuses new requests, and sends what running ones hold back."""
        self.draining.set()
        self.is_ending.set()

    def abort(self, error: OmniError) -> None:
        """Ends every running generation; clients receive `error`."""
        self.abort_error = error
        self.is_ending.set()
        for call in tuple(self.on_abort):
            call()


class ObservedGenerator:
    """Wraps a generator to count, log and trace each answer when it ends."""

    def __init__(self, generator: Generator, state: ServerState) -> None:
        self._generator = generator
        self._state = state
        self.model_info: ModelInfo = generator.model_info
        self.failed_replicas = generator.failed_replicas

    async def submit(self, request: OmniRequest, shorter: Shorter = lambda _: None) -> Generation:
        """Retries a prompt that is too long with what `shorter` returns, until that is None. All attempts count
        as one answer in log and metrics."""
        record = current_request()
        if record is not None:
            request = replace(request, caller=record.caller)
        answer = self._begin(request, record)
        try:
            while True:
                try:
                    generation = await self._generator.submit(request)
                    break
                except InvalidRequestError as error:
                    next_request = shorter(request) if error.code == "context_length_exceeded" else None
                    if next_request is None:
                        raise
                    request = next_request
                    answer.shortened(request)
        except Exception as error:
            answer.failed(error)
            raise
        except BaseException:  # cancelled: client disconnected
            answer.closed(self._state.abort_error)
            raise
        answer.admitted(generation.prompt, generation.began)
        return _ObservedGeneration(generation, answer, self._state)

    def task_messages(self, task: Task) -> tuple[ChatMessage, ...]:
        return self._generator.task_messages(task)

    def _begin(self, request: OmniRequest, record: RequestRecord | None) -> AnswerRecord:
        self._state.metrics.running.inc()

        def end(answer: AnswerRecord) -> None:
            self._state.metrics.answer_ended(answer)
            if record is not None and record.span is not None:
                record.span.answer_ended(answer, self.model_info)
            if record is not None and record.is_websocket:  # an HTTP request has a single line
                log_session_answer(record, answer)

        answer = AnswerRecord(request, on_end=end)
        if record is not None and not record.is_websocket:
            record.answers.append(answer)
        return answer


class _ObservedGeneration:
    """Implements `Generation`."""

    def __init__(self, generation: Generation, answer: AnswerRecord, state: ServerState) -> None:
        self.request_id = generation.request_id
        self.prompt = generation.prompt
        self.began = generation.began
        self._generation = generation
        self._answer = answer
        self._state = state

    async def __aiter__(self) -> AsyncIterator[OmniEvent]:
        try:
            async for event in self._generation:
                self._answer.take(event)
                yield event
        except Exception as error:
            self._answer.failed(error)
            raise

    async def aclose(self) -> None:
        try:
            await self._generation.aclose()
        finally:
            self._answer.closed(self._state.abort_error)
