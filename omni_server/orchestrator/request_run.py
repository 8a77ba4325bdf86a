"""One request on its way through the stages.

The thinker's tokens become text events; beside that, `Talk` makes its rows into sound. All of it lives in one task,
whose end, however it comes, releases the request in every stage.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace

import msgspec

from omni_server.engine.ar_client import ArStageClient
from omni_server.engine.ar_stream import ArOutput
from omni_server.engine.prompt_rendering import RenderedPrompt
from omni_server.engine.sampling import StageSampling
from omni_server.errors import CorruptDataError, DeadlineExceededError, OmniError
from omni_server.orchestrator.released_logprobs import ReleasedLogprobs
from omni_server.orchestrator.spoken_text import SpokenText
from omni_server.orchestrator.stage_clock import StageClock
from omni_server.orchestrator.talk import SpeechPlan, Talk
from omni_server.orchestrator.tool_parser import ToolParser
from omni_server.types import (
    Finished,
    FinishReason,
    OmniEvent,
    PromptTokens,
    SampledToken,
    TextDelta,
    TextDone,
    ToolCallDelta,
    Usage,
)

logger = logging.getLogger(__name__)

_CATCH_UP_TURNS = 4
"""Turns of the event loop for which a spoken request lets others catch up that came at the same moment and are a turn
or two behind. In each of these turns everybody's prompt may be read; behind them they reach the thinker together, and
their speech stays together (`stages.runtime.batching_delay`). Text alone gains nothing by it and goes on at once."""


class RequestRun:
    """Implements `omni_server.generation.Generation`."""

    def __init__(
        self,
        request_id: str,
        *,
        thinker: ArStageClient,
        prompt: RenderedPrompt,
        prompt_tokens: PromptTokens,
        thinker_params: StageSampling,
        spoken_text: SpokenText | None,
        tool_parser: ToolParser | None = None,
        speech: SpeechPlan | None,
        deadline_s: float,
        is_logged: bool,
        on_corrupt: Callable[[CorruptDataError], object],
        on_end: Callable[[str], object],
    ) -> None:
        """`spoken_text` is given where stop strings may cut text that would otherwise be spoken, or where text may
        turn out to be a tool call, `tool_parser` where the model may call tools."""
        self.request_id = request_id
        self.prompt = prompt_tokens
        self._thinker = thinker
        self._rendered = prompt
        self._thinker_params = thinker_params
        self._spoken_text = spoken_text
        self._tool_parser = tool_parser
        self._num_speakable_chars = 0
        self._logprobs = ReleasedLogprobs()
        self._deadline_s = deadline_s
        self._is_logged = is_logged
        self._on_corrupt = on_corrupt
        self._on_end = on_end
        self._events: asyncio.Queue[OmniEvent | OmniError] = asyncio.Queue()
        self._num_text_tokens = 0
        self._num_cached_tokens = 0
        self._text_finish: FinishReason = "stop"
        self._task: asyncio.Task[None] | None = None
        self._is_over = False  # for the consumer: the last event has been delivered
        self._is_released = False
        self._clock = StageClock()
        self._talk: Talk | None = None
        if speech is not None:
            self._talk = Talk(
                request_id, speech, is_limited=spoken_text is not None, clock=self._clock, emit=self._events.put_nowait
            )

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
                await self._stages()
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
        """Rows that the talker has not been given are dropped; whoever still waits for an event is woken."""
        if self._is_released:
            return
        self._is_released = True
        if self._talk is not None:
            self._talk.close()
        # Behind another last event nobody reads it.
        self._events.put_nowait(OmniError("the request was ended before it was finished"))
        self._on_end(self.request_id)

    async def _stages(self) -> None:
        if self._talk is None:
            await self._think()
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._talk.run())
            for _ in range(_CATCH_UP_TURNS):
                await asyncio.sleep(0)
            group.create_task(self._think())

    async def _think(self) -> None:
        async with self._thinker.life.needed():
            await self._write()

    async def _write(self) -> None:
        sink = None if self._talk is None else self._talk.rows.take
        stream = await self._thinker.open(self.request_id, self._rendered, self._thinker_params, sink)
        try:
            async with aclosing(stream.outputs()) as outputs:
                async for output in outputs:
                    if self._rendered.reply is None:
                        self._take(output)
                    elif output.finish_reason is not None:
                        self._take_reply(self._rendered.reply)
        finally:
            await stream.close()

    def _take(self, output: ArOutput) -> None:
        self._num_text_tokens += len(output.token_ids)
        self._num_cached_tokens = output.num_cached_tokens
        if output.text or output.token_ids:
            self._clock.text()
        logprobs = self._logprobs.push(output.logprobs, output.text)
        if output.finish_reason is not None and not output.is_cut:
            logprobs += self._logprobs.rest()
        speakable = output.text
        if self._tool_parser is None:
            if output.text or output.token_ids:
                self._events.put_nowait(TextDelta(output.text, output.token_ids, logprobs))
        else:
            speakable = self._parse(self._tool_parser, output, logprobs)
        if self._spoken_text is not None and self._talk is not None:
            self._spoken_text.push(output.token_ids, speakable)
            self._talk.rows.allow(self._spoken_text.num_speakable())
        if output.finish_reason is not None:
            self._text_done(output.finish_reason)

    def _parse(self, parser: ToolParser, output: ArOutput, logprobs: tuple[SampledToken, ...]) -> str:
        """Prose and calls as events, the first with tokens and log-probabilities; returns what may be spoken of it."""
        pieces = parser.push(output.text)
        if output.finish_reason is not None:
            pieces += parser.finish()
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        if text or output.token_ids:
            self._events.put_nowait(TextDelta(text, output.token_ids, logprobs))
        for piece in pieces:
            if isinstance(piece, ToolCallDelta):
                self._events.put_nowait(piece)
        before, self._num_speakable_chars = self._num_speakable_chars, parser.num_speakable
        return text[: parser.num_speakable - before]

    def _take_reply(self, text: str) -> None:
        """All rows of the given reply have come; the token that was sampled behind it is not part of it."""
        token_ids = self._rendered.token_ids[self._rendered.length :]
        self._num_text_tokens = len(token_ids)
        self._clock.text()
        self._events.put_nowait(TextDelta(text, token_ids))
        self._text_done("stop", num_without_row=0)

    def _text_done(self, reason: FinishReason, *, num_without_row: int = 1) -> None:
        """The last token of a text was sampled but never computed, so it has no row: the text-end row stands in its
        place."""
        has_calls = self._tool_parser is not None and self._tool_parser.num_calls > 0
        self._text_finish = "tool_calls" if has_calls and reason == "stop" else reason
        self._events.put_nowait(TextDone(reason))
        if self._talk is None:
            return
        num_spoken = self._num_text_tokens - num_without_row
        if self._spoken_text is not None:
            num_spoken = min(num_spoken, self._spoken_text.num_speakable())
        num_rows = self._talk.rows.num_generated_rows
        if num_rows < num_spoken:
            # The talker would wait for ever, or speak what the thinker did not say.
            raise CorruptDataError(self._thinker.name, "row_sequence", f"{num_rows} rows for {num_spoken} tokens")
        self._talk.end_text(num_spoken)

    def _finished(self) -> Finished:
        """Either stage running into its limit makes the answer incomplete."""
        reason, num_codes = self._text_finish, 0
        if self._talk is not None:
            num_codes = self._talk.num_codes
            if self._talk.finish_reason == "length":
                reason = "length"
        prompt = replace(self.prompt, cached=self._num_cached_tokens)
        times = self._clock.times()
        if self._is_logged and logger.isEnabledFor(logging.DEBUG):
            logger.debug("request %s: times %s", self.request_id, msgspec.json.encode(times).decode())
        return Finished(reason, Usage(prompt, self._num_text_tokens, num_codes), times)


def _first(group: BaseExceptionGroup[OmniError]) -> OmniError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, OmniError)
    return error
