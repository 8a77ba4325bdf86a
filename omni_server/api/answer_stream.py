"""The path of an answer's events from the stages to the routes: observed, bounded, with heartbeats, and ended
when the server aborts."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import replace

from omni_server.api.access_log import log_session_answer
from omni_server.api.audio_pace import AudioPace
from omni_server.api.messages import without_oldest
from omni_server.api.request_record import AnswerRecord, RequestRecord, current_request
from omni_server.api.state import ServerState
from omni_server.api.unsent import size_of
from omni_server.errors import InvalidRequestError
from omni_server.generation import Generation, Generator
from omni_server.types import Finished, OmniEvent, OmniRequest, Usage

logger = logging.getLogger(__name__)

ChoiceEvent = tuple[int, OmniEvent]
"""Index of the generation, and its event."""


class AnswerStream:
    """One answer: one generation in total, or one per choice, passage of a text or piece of a recording. Each
    is counted, logged and traced when it ends. Must be closed."""

    def __init__(
        self,
        generator: Generator,
        state: ServerState,
        name: str,
        *,
        one_by_one: Sequence[OmniRequest] = (),
        input_param: str = "messages",
    ) -> None:
        """`one_by_one` are requests that `events` submits, one after another. For speech, each ends long
        before a listener has heard all of it, or the limit `ApiConfig.max_audio_ahead_s` earlier.
        `input_param` is the request field of their prompts, for errors. `name` identifies the answer in the
        log."""
        self._generator = generator
        """Not looked up again: a draining server still completes started answers."""
        self._state = state
        self._name = name
        self._one_by_one = deque(one_by_one)
        self._input_param = input_param
        self._generations: list[tuple[Generation, AnswerRecord]] = []
        self._num_running = 0
        self._items: deque[ChoiceEvent | Exception] = deque()
        """What has been generated and not been sent: for clients that read at the speed of speech."""
        self._woken = asyncio.Event()
        self._is_over = False
        """Dropped or closed: later events are ignored."""
        self.file = b""
        """The whole answer, which counts as unsent; empty once it is dropped or closed."""
        self._num_held = 0
        self.usages: list[Usage] = []
        """Usage of each generation that has ended so far."""
        self.num_cut_short = 0
        """Generations whose text or speech reached its stage's token limit."""

    async def submit(self, request: OmniRequest, *, truncates: bool = False) -> None:
        """Adds a generation. With `truncates`, retries a prompt that is too long without its oldest messages.
        All attempts count as one answer in log and metrics. Raises what `Generator.submit` raises."""
        record = current_request()
        if record is not None:
            request = replace(request, caller=record.caller)
        answer = self._begin(request, record)
        index = len(self._generations)

        def deliver(event: OmniEvent | Exception) -> None:
            try:
                answer.take(event)
            finally:  # the reader waits for it
                self._put(index, event)

        try:
            while True:
                shorter = without_oldest(request.messages) if truncates else None
                request = replace(request, can_be_shortened=shorter is not None)
                try:
                    generation = await self._generator.submit(request, deliver)
                    break
                except InvalidRequestError as error:
                    if error.code != "context_length_exceeded" or shorter is None:
                        raise
                    request = replace(request, messages=shorter)
                    answer.shortened(request)
        except Exception as error:
            if isinstance(error, InvalidRequestError) and error.param == "messages":
                error.param = self._input_param
            answer.take(error)
            raise
        except BaseException:  # cancelled: client disconnected
            answer.closed(self._state.abort_error)
            raise
        answer.admitted(generation.prompt, generation.began)
        self._generations.append((generation, answer))
        self._num_running += 1
        if self._is_over:  # dropped meanwhile
            generation.cancel()

    async def events(
        self, heartbeat_s: float | None = None, pace: AudioPace | None = None
    ) -> AsyncGenerator[ChoiceEvent | None, None]:
        """Yields events until every generation has finished, and None after every `heartbeat_s` seconds
        of silence. With a `pace`, audio and what is behind it wait until they may be sent.

        Raises what `submit` and a generation raise, `ServerState.abort_error` when the server aborts, and
        `InvalidRequestError` when the backlog exceeds what `ServerState.unsent` allows.
        """
        wake = self._woken.set
        self._state.on_abort.add(wake)
        try:
            while self._num_running or self._one_by_one:
                if not self._num_running:
                    await self._submit_next()
                item = await self._next(heartbeat_s) if self._state.abort_error is None else None
                if pace is not None and isinstance(item, tuple):
                    while not await pace.wait(item[1], heartbeat_s or math.inf):
                        yield None
                if self._state.abort_error is not None:  # checked first: a generation may never pause
                    raise self._state.abort_error
                if isinstance(item, Exception):
                    raise item
                if item is not None and isinstance(item[1], Finished):
                    self._num_running -= 1
                    self.usages.append(item[1].usage)
                    self.num_cut_short += item[1].finish_reason == "length"
                yield item
        finally:
            self._state.on_abort.remove(wake)

    async def aclose(self) -> None:
        """Ends what still runs and discards what has not been sent."""
        self._end()
        for generation, _ in self._generations:
            await generation.aclose()
        self._generations.clear()  # they refer to this stream

    def hold(self, num_bytes: int) -> None:
        """`num_bytes` of the answer's file count as unsent until this is closed. Raises `InvalidRequestError`
        if they are too many."""
        if not self._is_over:
            added, self._num_held = num_bytes - self._num_held, num_bytes
            self._state.unsent.add(self, added)
        if self._items and isinstance(self._items[0], InvalidRequestError):
            raise self._items[0]

    def drop(self, num_bytes: int) -> None:
        """Ends all generations, even if the reader asks for no further event; the next one is an error."""
        logger.warning("%s is dropped: its client has left %d bytes of it untaken", self._name, num_bytes)
        self._end()
        reason = "The client reads too slowly"
        if self._num_held:
            reason += ", or the file is too large without 'stream': true"
        self._items.append(
            InvalidRequestError(
                f"{reason}: {num_bytes} bytes of its answer wait to be sent, and the server does not keep them "
                "any longer.",
                code="client_too_slow",
            )
        )
        self._woken.set()

    def _end(self) -> None:
        self._is_over = True
        self._one_by_one.clear()  # the media in them must not wait for the garbage collector
        self._items.clear()
        self.file = b""
        self._state.unsent.remove(self)
        for generation, answer in self._generations:
            answer.closed(self._state.abort_error)
            generation.cancel()

    def _put(self, index: int, event: OmniEvent | Exception) -> None:
        if self._is_over:
            return
        if isinstance(event, Exception):
            self._items.append(event)
        else:
            self._items.append((index, event))
            self._state.unsent.add(self, size_of(event))
        self._woken.set()

    async def _next(self, heartbeat_s: float | None) -> ChoiceEvent | Exception | None:
        """Returns None after `heartbeat_s` seconds, or when the server aborts."""
        if not self._items:
            self._woken.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(heartbeat_s):
                    await self._woken.wait()
        if not self._items:
            return None
        item = self._items.popleft()
        if isinstance(item, tuple):
            self._state.unsent.add(self, -size_of(item[1]))
        return item

    async def _submit_next(self) -> None:
        try:
            await self.submit(self._one_by_one.popleft())
        except InvalidRequestError as error:
            is_asked = error.param is not None and error.param.startswith("stage_sampling.")
            if error.code == "context_length_exceeded" and not is_asked:
                error.param = self._input_param
            raise

    def _begin(self, request: OmniRequest, record: RequestRecord | None) -> AnswerRecord:
        self._state.metrics.running.inc()

        def end(answer: AnswerRecord) -> None:
            self._state.metrics.answer_ended(answer)
            if record is not None and record.span is not None:
                record.span.answer_ended(answer, self._generator.model_info)
            if record is not None and record.is_websocket:  # an HTTP request has a single line
                log_session_answer(record, answer)

        answer = AnswerRecord(request, on_end=end)
        if record is not None and not record.is_websocket:
            record.answers.append(answer)
        return answer
