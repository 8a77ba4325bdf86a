"""A generator whose generations are counted and logged, from the events that pass to the caller."""

from collections.abc import AsyncIterator, Callable

from omni_server.api.access_log import log_session_answer
from omni_server.api.answer_record import AnswerRecord
from omni_server.api.request_record import RequestRecord, current_request
from omni_server.errors import InvalidRequestError, OmniError, StageDownError
from omni_server.generation import Generation, Generator
from omni_server.metrics.server_metrics import ServerMetrics
from omni_server.types import ChatMessage, ModelInfo, OmniEvent, OmniRequest, Task

AbortError = Callable[[], OmniError | None]
Shorter = Callable[[OmniRequest], OmniRequest | None]


class ObservedGenerator:
    """Implements `Generator` by `generator`."""

    def __init__(self, generator: Generator, metrics: ServerMetrics, abort_error: AbortError) -> None:
        """`abort_error` tells why the server ends generations by itself, None while it does not."""
        self._generator = generator
        self._metrics = metrics
        self._abort_error = abort_error
        self.model_info: ModelInfo = generator.model_info

    async def submit(self, request: OmniRequest) -> Generation:
        return await self.submit_fitting(request, lambda _: None)

    async def submit_fitting(self, request: OmniRequest, shorter: Shorter) -> Generation:
        """As `submit`, but where the prompt is too long `shorter` gives what to try instead, until it gives None.
        All of it is one answer for log and metrics."""
        record = current_request()
        answer = AnswerRecord(request)
        if record is not None and not record.is_websocket:
            record.answers.append(answer)
        observation = _Observation(answer, record, self._metrics, self.model_info.name)
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
            observation.failed(error)
            raise
        except BaseException:  # cancelled: the client has left
            observation.closed(self._abort_error())
            raise
        answer.admitted(generation.prompt)
        return _ObservedGeneration(generation, observation, self._abort_error)

    def is_ready(self) -> bool:
        return self._generator.is_ready()

    def is_alive(self) -> bool:
        return self._generator.is_alive()

    def stage_down(self) -> StageDownError | None:
        return self._generator.stage_down()

    def task_messages(self, task: Task) -> tuple[ChatMessage, ...]:
        return self._generator.task_messages(task)

    def metrics_text(self) -> bytes:
        return self._generator.metrics_text()


class _Observation:
    """One answer from its beginning to its end, which is counted once."""

    def __init__(self, answer: AnswerRecord, record: RequestRecord | None, metrics: ServerMetrics, model: str) -> None:
        self._answer = answer
        self._record = record
        self._metrics = metrics
        self._model = model
        self._is_over = False
        metrics.answer_began()

    def take(self, event: OmniEvent) -> None:
        self._answer.take(event)
        if self._answer.finished is not None:
            self._end()

    def failed(self, error: Exception) -> None:
        self._answer.failed(error)
        self._end()

    def closed(self, abort_error: OmniError | None) -> None:
        if abort_error is not None:
            self._answer.failed(abort_error)
        else:
            self._answer.closed()
        self._end()

    def _end(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        answer = self._answer
        self._metrics.answer_ended(answer)
        if self._record is None:
            return
        if self._record.span is not None:
            self._record.span.answer_ended(answer, self._model)
        # An HTTP request has one line for all of it.
        if self._record.is_websocket:
            log_session_answer(self._record, answer)


class _ObservedGeneration:
    """Implements `Generation`."""

    def __init__(self, generation: Generation, observation: _Observation, abort_error: AbortError) -> None:
        self.request_id = generation.request_id
        self.prompt = generation.prompt
        self._generation = generation
        self._observation = observation
        self._abort_error = abort_error

    def __aiter__(self) -> AsyncIterator[OmniEvent]:
        return _ObservedEvents(aiter(self._generation), self._observation)

    async def aclose(self) -> None:
        try:
            await self._generation.aclose()
        finally:
            self._observation.closed(self._abort_error())


class _ObservedEvents:
    """An iterator rather than a generator: it adds one call to each event, and the inner one is still the only thing
    that holds the request."""

    def __init__(self, events: AsyncIterator[OmniEvent], observation: _Observation) -> None:
        self._events = events
        self._observation = observation

    def __aiter__(self) -> "_ObservedEvents":
        return self

    async def __anext__(self) -> OmniEvent:
        try:
            event = await anext(self._events)
        except StopAsyncIteration:
            raise
        except Exception as error:
            self._observation.failed(error)
            raise
        self._observation.take(event)
        return event
