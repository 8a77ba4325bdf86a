"""One request on its way through the stages.

Three coroutines run side by side and hand over through queues: the thinker's tokens become text events, its rows go
to the talker; the talker's tokens become windows; code2wav's results become audio events. All of them live in one
task, whose end, however it comes, releases the request in every stage.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from omni_server.edge import Code2WavRequest, CodecEdge
from omni_server.engine.ar_client import ArStageClient, ArStream, RenderedPrompt
from omni_server.engine.diffusion_client import DiffusionStageClient
from omni_server.engine.sampling import StageSampling
from omni_server.errors import DeadlineExceededError, OmniError, StageError
from omni_server.family import TalkerPrompt
from omni_server.orchestrator.spoken_text import SpokenText
from omni_server.protocol.rows import RowsFeed, RowsPayload, SharedBlock
from omni_server.types import (
    AudioDelta,
    CodecDelta,
    Finished,
    FinishReason,
    OmniEvent,
    PromptTokens,
    TextDelta,
    TextDone,
    Usage,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpeechPlan:
    """What a request that is answered by voice needs beside its thinker prompt."""

    talker: ArStageClient
    code2wav: DiffusionStageClient
    talker_prompt: TalkerPrompt
    talker_params: StageSampling
    talker_stop_ids: tuple[int, ...]
    codec_edge: CodecEdge
    num_boundary_rows: int
    """Rows between the thinker's prompt and the first generated row."""
    drop_block: Callable[[SharedBlock], None]
    """Ends a reference to shared memory that will not be fed any more."""


@dataclass(frozen=True)
class _Speakable:
    num_tokens: int


@dataclass(frozen=True)
class _TextEnd:
    num_spoken: int


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
        speech: SpeechPlan | None,
        deadline_s: float,
        on_end: Callable[[str], object],
    ) -> None:
        """`spoken_text` is given where stop strings may cut text that would otherwise be spoken."""
        self.request_id = request_id
        self.prompt = prompt_tokens
        self._thinker = thinker
        self._rendered = prompt
        self._thinker_params = thinker_params
        self._spoken_text = spoken_text
        self._speech = speech
        self._deadline_s = deadline_s
        self._on_end = on_end
        self._events: asyncio.Queue[OmniEvent | OmniError] = asyncio.Queue()
        self._rows: asyncio.Queue[RowsPayload | _Speakable | _TextEnd] = asyncio.Queue()
        self._windows: asyncio.Queue[Code2WavRequest | None] = asyncio.Queue()
        self._num_text_tokens = 0
        self._num_codec_tokens = 0
        self._num_cached_tokens = 0
        self._finish_reason: FinishReason = "stop"
        self._task: asyncio.Task[None] | None = None
        self._is_over = False  # for the consumer: the last event has been delivered
        self._is_released = False
        self._is_opened = False

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
            self._events.put_nowait(_first(group))
        except* Exception as group:
            logger.exception("request %s failed", self.request_id, exc_info=group)
            self._events.put_nowait(OmniError("internal error"))
        else:
            prompt = replace(self.prompt, cached=self._num_cached_tokens)
            usage = Usage(prompt, self._num_text_tokens, self._num_codec_tokens)
            self._events.put_nowait(Finished(self._finish_reason, usage))
        finally:
            self._release()

    def _release(self) -> None:
        """What the stages have not been given is dropped; whoever still waits for an event is woken."""
        if self._is_released:
            return
        self._is_released = True
        if not self._is_opened:
            self._thinker.discard(self._rendered)
        while not self._rows.empty():
            item = self._rows.get_nowait()
            if isinstance(item, RowsPayload):
                self._drop(item)
        # Behind another last event nobody reads it.
        self._events.put_nowait(OmniError("the request was ended before it was finished"))
        self._on_end(self.request_id)

    async def _stages(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._think())
            if self._speech is not None:
                group.create_task(self._talk(self._speech))
                group.create_task(self._vocalise(self._speech))

    async def _think(self) -> None:
        sink = self._rows.put_nowait if self._speech is not None else None
        stream = await self._thinker.open(self.request_id, self._rendered, self._thinker_params, sink)
        self._is_opened = True
        try:
            async with aclosing(stream.outputs()) as outputs:
                async for output in outputs:
                    self._num_text_tokens += len(output.token_ids)
                    self._num_cached_tokens = output.num_cached_tokens
                    if output.text or output.token_ids:
                        self._events.put_nowait(TextDelta(output.text, output.token_ids))
                    if self._spoken_text is not None:
                        self._spoken_text.push(output.token_ids, output.text)
                        self._rows.put_nowait(_Speakable(self._spoken_text.num_speakable()))
                    if output.finish_reason is not None:
                        self._text_done(output.finish_reason)
        finally:
            await stream.close()

    def _text_done(self, reason: FinishReason) -> None:
        self._note_finish(reason)
        self._events.put_nowait(TextDone(reason))
        # The last token was sampled but never computed, so it has no row: the text-end row stands in its place.
        num_spoken = self._num_text_tokens - 1
        if self._spoken_text is not None:
            num_spoken = min(num_spoken, self._spoken_text.num_speakable())
        self._rows.put_nowait(_TextEnd(num_spoken))

    async def _talk(self, speech: SpeechPlan) -> None:
        """Feeds the talker; it is opened by the first rows and closed when its tokens have ended."""
        stream: ArStream | None = None
        try:
            async with asyncio.TaskGroup() as group:
                listening: asyncio.Task[None] | None = None
                async for feed, is_silent in self._feeds(speech):
                    if is_silent:
                        if listening is not None:
                            listening.cancel()
                        self._windows.put_nowait(None)
                        return
                    if stream is None:
                        try:
                            stream = await speech.talker.open(
                                self.request_id, speech.talker_prompt.token_ids, speech.talker_params
                            )
                        except BaseException:
                            if feed.payload is not None:
                                self._drop(feed.payload)  # it has left the queue and reached nobody
                            raise
                        listening = group.create_task(self._listen(speech, stream))
                    await stream.feed(feed)
        finally:
            if stream is not None:
                await stream.close()

    async def _feeds(self, speech: SpeechPlan) -> AsyncIterator[tuple[RowsFeed, bool]]:
        """What to feed, until the reply has ended; the flag says that there is nothing to speak at all."""
        base = speech.talker_prompt.num_replaced + speech.num_boundary_rows
        limit: int | None = base if self._spoken_text is not None else None
        num_rows = 0  # of generated tokens
        while True:
            match await self._rows.get():
                case RowsPayload() as payload:
                    num_rows = max(num_rows, payload.num_generated_rows)
                    yield RowsFeed(payload, num_speakable=limit), False
                case _Speakable(num_tokens):
                    limit = base + num_tokens
                    yield RowsFeed(num_speakable=limit), False
                case _TextEnd(num_spoken):
                    if num_rows < num_spoken:
                        # The talker would wait for ever, or speak what the thinker did not say.
                        raise StageError(self._thinker.name, f"sent {num_rows} rows for {num_spoken} tokens")
                    yield RowsFeed(num_speakable=None, final_length=base + num_spoken), num_spoken < 1
                    return

    async def _listen(self, speech: SpeechPlan, stream: ArStream) -> None:
        async with aclosing(stream.outputs()) as outputs:
            async for output in outputs:
                codes = output.token_ids
                if output.finish_reason == "stop" and codes and codes[-1] in speech.talker_stop_ids:
                    codes = codes[:-1]
                if output.finish_reason is not None:
                    self._note_finish(output.finish_reason)
                if codes:
                    self._num_codec_tokens += len(codes)
                    self._events.put_nowait(CodecDelta(codes))
                    for window in speech.codec_edge.push(codes):
                        self._windows.put_nowait(window)
        for window in speech.codec_edge.finish():
            self._windows.put_nowait(window)
        self._windows.put_nowait(None)

    async def _vocalise(self, speech: SpeechPlan) -> None:
        number = 0
        while (window := await self._windows.get()) is not None:
            samples = await speech.code2wav.run(f"{self.request_id}-{number}", window.token_ids, window.payload)
            if len(samples) != window.num_samples:
                raise StageError(
                    speech.code2wav.name, f"sent {len(samples)} samples where {window.num_samples} were asked for"
                )
            self._events.put_nowait(AudioDelta(window.first_sample, samples))
            number += 1

    def _note_finish(self, reason: FinishReason) -> None:
        """Either stage running into its limit makes the answer incomplete."""
        if reason == "length":
            self._finish_reason = reason

    def _drop(self, payload: RowsPayload) -> None:
        if isinstance(payload.block, SharedBlock):
            assert self._speech is not None
            self._speech.drop_block(payload.block)


def _first(group: BaseExceptionGroup[OmniError]) -> OmniError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, OmniError)
    return error
