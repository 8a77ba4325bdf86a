"""One request on its way through the stages that it needs.

The stages form a tree from the entry to the outputs. Each stage of the tree is a task, and so is the stream
of windows that becomes audio. Data that crosses an edge is handed on synchronously, when it arrives.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from omni_server.audio.filters import Resampler
from omni_server.engine.ar_handle import ArHandle
from omni_server.engine.ar_stream import ArOutput
from omni_server.engine.engine_handle import EngineHandle, HandleT, Stage
from omni_server.engine.prompt_rendering import RenderedPrompt
from omni_server.engine.sampling import StageSampling
from omni_server.errors import CorruptDataError, DeadlineExceededError, OmniError, first_leaf
from omni_server.family import CodecEdge
from omni_server.orchestrator.caller_turns import Turn
from omni_server.orchestrator.released_logprobs import ReleasedLogprobs
from omni_server.orchestrator.request_timeline import RequestTimeline
from omni_server.orchestrator.row_feeder import RowFeeder
from omni_server.orchestrator.speech_decoding import SpeechDecoding
from omni_server.orchestrator.speech_stream import SpeechStream
from omni_server.orchestrator.spoken_text import SpokenText
from omni_server.orchestrator.tool_parser import Piece, ToolParser
from omni_server.types import (
    SAMPLE_RATE_HZ,
    AudioDelta,
    CodecDelta,
    Finished,
    FinishReason,
    OmniEvent,
    PromptTokens,
    TextDelta,
    TextDone,
    ToolCallDelta,
    Usage,
)

logger = logging.getLogger(__name__)

_CATCH_UP_TURNS = 4
"""Turns of the event loop that a spoken request waits for others that arrived at the same moment but are a
turn or two behind. Each turn may read the prompts of all of them. They then reach the entry together, and
their speech stays together (`stages.runtime.batching_delay`). Text-only requests gain nothing from this and
continue immediately."""


class GraphTask(Protocol):
    """A part of the tree."""

    async def run(self) -> None:
        """Returns when the part has done all its work. Raises `OmniError`."""
        ...


TaskT = TypeVar("TaskT", bound=GraphTask)


class RequestRun:
    """Implements `omni_server.generation.Generation`. Filled by `add`, then started. `close` must follow if it is
    not; after that, the request is released in every stage when its task ends, for any reason."""

    prompt: PromptTokens

    def __init__(self, request_id: str, turn: Turn, through: EngineHandle | None = None) -> None:
        """`through`: the engine to choose in its stage."""
        self.request_id = request_id
        self.turn = turn
        self.timeline = RequestTimeline()
        self.began = self.timeline.began
        self.text: TextOutput | None = None
        self.audio: AudioTask | None = None
        self.num_image_tokens = 0
        """Of the generated image."""
        self._through = through
        self._bound: list[EngineHandle] = []
        self._events: asyncio.Queue[OmniEvent | OmniError] = asyncio.Queue()
        """Holds what the reader has not taken: at most one answer, which ends with the request's deadline."""
        self._tasks: list[GraphTask] = []
        self._task: asyncio.Task[None] | None = None
        self._on_end: Callable[[str], object] | None = None
        self._is_over = False  # for the reader: the last event has been delivered
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

    # -- the reader's side

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
        """Ends the request. A reader that is still iterating gets an `OmniError`."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    # -- the request's own tasks

    def choose(self, stage: Stage[HandleT]) -> HandleT:
        """Binds the request to an engine of the stage, until `leave` or `close`."""
        handle = stage.choose(self._through)
        self._bound.append(handle)
        if len(stage.handles) > 1:
            self.timeline.mark_replica(stage.name, handle.number)
        return handle

    def leave(self, handle: EngineHandle) -> None:
        """The request no longer needs the engine. Harmless if it has left already."""
        if handle in self._bound:
            self._bound.remove(handle)
            handle.leave()

    def emit(self, event: OmniEvent) -> None:
        self.turn.begin()
        self._events.put_nowait(event)

    def close(self) -> None:
        """Drops embeddings that have not been handed on or that arrive later, leaves all engines, and wakes a
        reader that is waiting for an event. Harmless if already closed."""
        if self._is_closed:
            return
        self._is_closed = True
        self.turn.end()
        for handle in tuple(self._bound):
            self.leave(handle)
        for task in self._tasks:
            if isinstance(task, ArTask) and task.source is not None:
                task.source.close()
        # These refer to the request. A prompt with its media must not wait for the garbage collector.
        self._tasks.clear()
        self.text = self.audio = None
        # Never read if another final event precedes it.
        self._events.put_nowait(OmniError("the request was ended before it was finished"))
        if self._on_end is not None:
            self._on_end(self.request_id)

    async def _run(
        self, deadline_s: float, *, is_logged: bool, on_corrupt: Callable[[CorruptDataError], object]
    ) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await self._run_tasks()
        except* TimeoutError:
            self._events.put_nowait(DeadlineExceededError("the request's deadline has passed"))
        except* OmniError as group:
            error = first_leaf(group)
            if isinstance(error, CorruptDataError):
                logger.error("request %s: %s", self.request_id, error.message)
                on_corrupt(error)
            self._events.put_nowait(error)
        except* Exception as group:
            logger.exception("request %s failed", self.request_id, exc_info=group)
            self._events.put_nowait(OmniError("internal error"))
        else:
            finished = self._finished()
            if is_logged and logger.isEnabledFor(logging.DEBUG):
                times = msgspec.json.encode(finished.times).decode()
                logger.debug("request %s: times %s", self.request_id, times)
            self._events.put_nowait(finished)
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
        reason: FinishReason = "stop"
        num_text, num_cached, num_frames = 0, 0, 0
        if self.text is not None:
            reason, num_text, num_cached = self.text.finish_reason, self.text.num_tokens, self.text.num_cached
        if self.audio is not None:
            num_frames = self.audio.num_frames
            if self.audio.finish_reason == "length":
                reason = "length"
        prompt = replace(self.prompt, cached=num_cached)
        usage = Usage(prompt, num_text, num_frames, self.num_image_tokens)
        return Finished(reason, usage, self.timeline.times())


@dataclass(eq=False)
class ArTask:
    """Runs one autoregressive stage: submits the request, hands on its outputs and releases it."""

    request: RequestRun
    stage: Stage[ArHandle]
    prompt: RenderedPrompt | tuple[int, ...]
    params: StageSampling
    output: "TextOutput | AudioTask"
    source: RowFeeder | None = None
    """Feeds the stage; None for the entry."""
    speaker: "ArTask | None" = None
    """The stage that this one's embeddings flow to."""
    handle: ArHandle | None = None
    """The engine that has rendered the prompt. None: one is chosen when there are rows for it."""

    def __post_init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        if self.source is None:
            self.request.timeline.mark_submitted(self.stage.name)

    async def run(self) -> None:
        self._task = asyncio.current_task()
        if self.source is not None:
            await self.source.has_rows.wait()
        handle = self.request.choose(self.stage) if self.handle is None else self.handle
        async with handle.life.needed():
            await self._generate(handle)
        self.request.leave(handle)

    def skip(self) -> None:
        """Skips the stage: no embeddings of generated tokens will arrive."""
        assert self._task is not None
        self._task.cancel()
        if isinstance(self.output, AudioTask):
            self.output.finish()

    async def _generate(self, handle: ArHandle) -> None:
        fed = None if self.speaker is None else self.speaker.source
        stream = await handle.open(
            self.request.request_id,
            self.prompt,
            self.params,
            None if fed is None else fed.take,
            tokens_per_output=self.output.tokens_per_output,
            priority=self.request.turn.number,
        )
        try:
            if self.source is not None:
                self.request.timeline.mark_submitted(self.stage.name)
                self.source.connect(handle.outbox, stream.engine_id)
            async with aclosing(stream.outputs()) as outputs:
                async for output in outputs:
                    self.output.take(output)
        finally:
            if self.source is not None:
                self.source.close()
            await stream.close()


class AudioTask:
    """Turns the tokens of a stage into frames, windows and finally audio at the sample rate of the API."""

    def __init__(
        self,
        request: RequestRun,
        source: str,
        *,
        decoding: SpeechDecoding,
        edge: CodecEdge,
        stop_ids: tuple[int, ...],
    ) -> None:
        """`source` samples the tokens; every `num_sampled` consecutive tokens form a frame, with the codes
        predicted for them. `stop_ids` end the sequence and are not part of a frame."""
        layout = decoding.layout
        self._request = request
        self._source = source
        self._decoding = decoding
        self._edge = edge
        self._frames = decoding.frames
        self._stop_ids = stop_ids
        self._speech: SpeechStream | None = None  # until there is a frame to decode, or the end
        self._has_begun = asyncio.Event()
        self._resampler: Resampler | None = None
        if layout.sample_rate_hz != SAMPLE_RATE_HZ:
            self._resampler = Resampler(layout.sample_rate_hz, SAMPLE_RATE_HZ)
        # Windows end where a block does.
        self.tokens_per_output = layout.frames_per_block * decoding.frames.num_sampled
        self._rest: tuple[int, ...] = ()
        self._num_samples = 0
        self.num_frames = 0
        """Frames that became audio."""
        self.finish_reason: FinishReason | None = None
        """Why the source ended. None until then, or if there was nothing to speak."""

    async def run(self) -> None:
        with self._decoding.coming.stream():
            await self._has_begun.wait()
        await self._begun().run()
        if self._resampler is not None:
            self._send(self._resampler.flush())

    def take(self, output: ArOutput) -> None:
        """Accepts new tokens of the source."""
        tokens = output.token_ids
        if output.finish_reason == "stop" and tokens and tokens[-1] in self._stop_ids:
            tokens = tokens[:-1]
        if self._frames.num_predicted:
            assert output.predicted is not None
            codes = np.column_stack((np.array(tokens, np.int64), output.predicted[: len(tokens)]))
            tokens = tuple(codes.ravel().tolist())
        width = self._frames.num_codebooks
        tokens = self._rest + tokens
        end = len(tokens) - len(tokens) % width  # an incomplete frame is not spoken
        self._rest = tokens[end:]
        frames = [tokens[i : i + width] for i in range(0, end, width)]
        if frames:
            self._request.timeline.mark_output(self._source)
            self.num_frames += len(frames)
            self._request.emit(CodecDelta(tokens[:end]))
            self._begun().push(frames)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.finish()

    def finish(self) -> None:
        """Marks the end of the tokens; there may have been none."""
        self._begun().finish()

    def _begun(self) -> SpeechStream:
        """The stream of windows. The first call chooses the decoder."""
        if self._speech is None:
            decoder = self._request.choose(self._decoding.decoder)
            self._speech = SpeechStream(
                self._request.request_id,
                decoder=decoder,
                edge=self._edge,
                scheduler=self._decoding.schedulers[decoder.name],
                layout=self._decoding.layout,
                timeline=self._request.timeline,
                emit=self._take_audio,
                caller=self._request.turn.caller,
            )
            self._has_begun.set()
        return self._speech

    def _take_audio(self, delta: AudioDelta) -> None:
        self._send(delta.samples if self._resampler is None else self._resampler.push(delta.samples))

    def _send(self, samples: npt.NDArray[np.float32]) -> None:
        if samples.size:
            self._request.timeline.mark_output(self._decoding.decoder.name)
            self._request.emit(AudioDelta(self._num_samples, samples))
            self._num_samples += samples.size


class TextOutput:
    """Turns the tokens of a stage into text, and reports how much of it may be spoken."""

    tokens_per_output = 1

    def __init__(
        self,
        request: RequestRun,
        stage: str,
        prompt: RenderedPrompt,
        *,
        spoken_text: SpokenText | None = None,
        tool_parser: ToolParser | None = None,
        speaker: ArTask | None = None,
    ) -> None:
        """`speaker` is the stage that receives the embeddings of the text. `spoken_text` is set if a stop string
        may cut text that would otherwise be spoken, or if text may turn out to be a tool call. `tool_parser`
        is set if the model may call tools."""
        self._request = request
        self._stage = stage
        self._prompt = prompt
        self._spoken_text = spoken_text
        self._tool_parser = tool_parser
        self._speaker = speaker
        self._feeder = None if speaker is None else speaker.source
        self._logprobs = ReleasedLogprobs()
        self._num_spoken_chars = 0
        self.num_tokens = 0
        self.num_cached = 0
        """Prompt tokens served from the prefix cache."""
        self.finish_reason: FinishReason = "stop"

    def take(self, output: ArOutput) -> None:
        if self._prompt.reply is not None:
            if output.finish_reason is not None:
                self._take_reply(self._prompt.token_ids[self._prompt.length :], self._prompt.reply)
            return
        self.num_tokens += len(output.token_ids)
        self.num_cached = output.num_cached_tokens
        if output.text or output.token_ids:
            self._request.timeline.mark_output(self._stage)
        logprobs = self._logprobs.push(output.logprobs, output.text)
        if output.finish_reason is not None and not output.is_cut:
            logprobs += self._logprobs.rest()
        is_ended = output.finish_reason == "stop" and not output.is_cut
        pieces: list[Piece] = [output.text]
        if self._tool_parser is not None:
            pieces = self._tool_parser.push(output.text)
            if output.finish_reason is not None:
                pieces += self._tool_parser.finish(is_cut=not is_ended)
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        if text or output.token_ids:
            self._request.emit(TextDelta(text, output.token_ids, logprobs))
        for piece in pieces:
            if isinstance(piece, ToolCallDelta):
                self._request.emit(piece)
        if self._feeder is not None:
            # The token that ends a text is no part of it.
            self._feeder.speak(output.token_ids[:-1] if is_ended else output.token_ids)
        if self._spoken_text is not None and self._feeder is not None:
            self._spoken_text.push(output.token_ids, self._spoken(text))
            self._feeder.allow(self._spoken_text.num_released())
        if output.finish_reason is not None:
            has_row = self._feeder is not None and self._feeder.has_row_of_last_token and not is_ended
            self._done(output.finish_reason, num_without_row=0 if has_row else 1)

    def _spoken(self, text: str) -> str:
        """Returns the speakable part of the newest text: the prose before the first call."""
        if self._tool_parser is None:
            return text
        before, self._num_spoken_chars = self._num_spoken_chars, self._tool_parser.num_prose_chars
        return text[: self._num_spoken_chars - before]

    def _take_reply(self, token_ids: tuple[int, ...], text: str) -> None:
        """Handles a given reply whose rows have all arrived. The token sampled after it is not part of it."""
        self.num_tokens = len(token_ids)
        if self._feeder is not None:
            self._feeder.speak(token_ids)
        self._request.timeline.mark_output(self._stage)
        self._request.emit(TextDelta(text, token_ids))
        self._done("stop", num_without_row=0)

    def _done(self, reason: FinishReason, *, num_without_row: int) -> None:
        """Ends the text. Its last `num_without_row` tokens are not spoken: the text-end row replaces them."""
        has_calls = self._tool_parser is not None and self._tool_parser.num_calls > 0
        self.finish_reason = "tool_calls" if has_calls and reason == "stop" else reason
        self._request.emit(TextDone(reason))
        if self._speaker is None or self._feeder is None:
            return
        num_spoken = self.num_tokens - num_without_row
        if self._spoken_text is not None:
            num_spoken = min(num_spoken, self._spoken_text.num_released())
        num_rows = self._feeder.num_generated_rows
        if num_rows < num_spoken:
            # The next stage would wait forever, or speak what this stage did not say.
            detail = f"{num_rows} rows for {num_spoken} tokens"
            raise CorruptDataError(self._stage, "row_sequence", detail)
        if num_spoken >= 1:
            self._feeder.finish(num_spoken)
        else:
            # The next stage has not begun to generate and never will: no row of a generated token arrives.
            self._speaker.skip()
