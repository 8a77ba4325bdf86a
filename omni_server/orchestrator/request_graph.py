"""One request on its way through the stages that it needs.

The stages form a tree from the entry to the outputs. Each stage of the tree is a task, and so is the stream
of windows that becomes audio; what flows over an edge is handed on synchronously, when it arrives.
"""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from omni_server.audio.filters import Resampler
from omni_server.edge import CodecEdge
from omni_server.engine.ar_handle import ArHandle
from omni_server.engine.ar_stream import ArOutput
from omni_server.engine.async_engine import RowSink
from omni_server.engine.prompt_rendering import RenderedPrompt
from omni_server.engine.sampling import StageSampling
from omni_server.errors import CorruptDataError
from omni_server.family import DiffusionPrompt
from omni_server.orchestrator.decoder import Decoder
from omni_server.orchestrator.feed_outbox import FeedOutbox
from omni_server.orchestrator.released_logprobs import ReleasedLogprobs
from omni_server.orchestrator.request_timeline import RequestTimeline
from omni_server.orchestrator.row_feeder import RowFeeder
from omni_server.orchestrator.speech_scheduler import SpeechScheduler
from omni_server.orchestrator.speech_stream import SpeechStream
from omni_server.orchestrator.spoken_text import SpokenText
from omni_server.orchestrator.tool_parser import ToolParser
from omni_server.protocol.rows import SharedBlock
from omni_server.types import (
    SAMPLE_RATE_HZ,
    AudioDelta,
    CodecDelta,
    FinishReason,
    ImageDone,
    ImageSize,
    OmniEvent,
    PromptTokens,
    SampledToken,
    TextDelta,
    TextDone,
    ToolCallDelta,
    Usage,
)

Emit = Callable[[OmniEvent], None]


@dataclass(frozen=True)
class TextPlan:
    """Of a stage whose tokens are text for the caller."""

    spoken_text: SpokenText | None
    """Given where stop strings may cut text that would otherwise be spoken, or where text may turn out to be
    a tool call."""
    tool_parser: ToolParser | None
    """Given where the model may call tools."""


@dataclass(frozen=True)
class DecoderPlan:
    """Of a stage whose tokens are codec frames: what makes audio of them."""

    decoder: Decoder
    edge: CodecEdge
    scheduler: SpeechScheduler
    num_codebooks: int
    """Consecutive tokens that are one frame."""
    sample_rate_hz: int
    """Of the decoder's audio."""
    stop_ids: tuple[int, ...]
    """Tokens that end the sequence, and are no part of a frame."""


@dataclass(frozen=True)
class EmbeddingsPlan:
    """Of a stage whose embeddings flow on to another one."""

    target: "ArPlan"
    num_first_rows: int
    """Rows that the target gets before the row of the first generated token."""
    outbox: FeedOutbox
    """Takes feeds for the target."""
    drop_block: Callable[[SharedBlock], None]
    """Ends a reference to shared memory that will not be fed any more."""


@dataclass(frozen=True)
class ArPlan:
    """What one request does in an autoregressive stage, and where its outputs go."""

    handle: ArHandle
    """The engine that has the request until it ends."""
    prompt: RenderedPrompt | tuple[int, ...]
    params: StageSampling
    text: TextPlan | None = None
    decoder: DecoderPlan | None = None
    embeddings: EmbeddingsPlan | None = None
    tokens_per_output: int = 1
    """Tokens are wanted in blocks of this many."""


@dataclass(frozen=True)
class ImagePlan:
    """What one request does where the stage that gets the prompt is a diffusion stage."""

    decoder: Decoder
    prompt: DiffusionPrompt
    size: ImageSize


class RequestGraph:
    """`run` ends when all outputs are complete; `close` must follow, however it ended."""

    def __init__(
        self, request_id: str, entry: ArPlan | ImagePlan, *, timeline: RequestTimeline, emit: Emit
    ) -> None:
        """`emit` gets all events but the last."""
        self._request_id = request_id
        self._timeline = timeline
        self._emit = emit
        self._runs: list[_ArRun | _AudioOutput | _ImageRun] = []  # consumers before their sources
        self._feeders: list[RowFeeder] = []
        self._text: _TextOutput | None = None
        self._frames: _FrameOutput | None = None
        if isinstance(entry, ImagePlan):
            self._runs.append(_ImageRun(request_id, entry, timeline, emit))
        else:
            self._add(entry, source=None)

    def _add(self, plan: ArPlan, source: RowFeeder | None) -> "_ArRun":
        feeder, target = None, None
        if plan.embeddings is not None:
            is_limited = plan.text is not None and plan.text.spoken_text is not None
            feeder = RowFeeder(
                plan.embeddings.outbox,
                plan.embeddings.drop_block,
                num_first_rows=plan.embeddings.num_first_rows,
                is_limited=is_limited,
            )
            self._feeders.append(feeder)
            target = self._add(plan.embeddings.target, feeder)
        if plan.decoder is not None:
            audio = _AudioOutput(self._request_id, plan.decoder, self._timeline, self._emit)
            self._runs.append(audio)
            self._frames = _FrameOutput(plan, plan.decoder, audio.speech, self._timeline, self._emit)
            take = self._frames.take
        else:
            assert plan.text is not None
            on_nothing = None if target is None else target.skip
            self._text = _TextOutput(plan, plan.text, feeder, on_nothing, self._timeline, self._emit)
            take = self._text.take
        run = _ArRun(
            self._request_id,
            plan,
            take=take,
            source=source,
            row_sink=None if feeder is None else feeder.take,
            on_skip=None if plan.decoder is None else audio.speech.finish,
            timeline=self._timeline,
        )
        self._runs.append(run)
        return run

    async def run(self, num_turns_before_entry: int) -> None:
        """The entry begins after so many turns of the event loop. Raises a group of `OmniError`."""
        async with asyncio.TaskGroup() as group:
            *others, entry = self._runs
            for stage in others:
                group.create_task(stage.run())
            if others:
                for _ in range(num_turns_before_entry):
                    await asyncio.sleep(0)
            group.create_task(entry.run())

    def close(self) -> None:
        """Embeddings that have not been handed on, or come later, are dropped. Harmless when already
        closed."""
        for feeder in self._feeders:
            feeder.close()

    def result(self, prompt: PromptTokens) -> tuple[FinishReason, Usage]:
        """Of a request that has ended well. Any stage running into its limit makes the answer incomplete."""
        reason: FinishReason = "stop"
        num_text, num_cached, num_frames = 0, 0, 0
        if self._text is not None:
            reason, num_text, num_cached = (
                self._text.finish_reason,
                self._text.num_tokens,
                self._text.num_cached,
            )
        if self._frames is not None:
            num_frames = self._frames.num_frames
            if self._frames.finish_reason == "length":
                reason = "length"
        return reason, Usage(replace(prompt, cached=num_cached), num_text, num_frames)


class _ArRun:
    """One stage: it is given the request, its outputs are handed on, and it is released."""

    def __init__(
        self,
        request_id: str,
        plan: ArPlan,
        *,
        take: Callable[[ArOutput], None],
        source: RowFeeder | None,
        row_sink: RowSink | None,
        on_skip: Callable[[], None] | None,
        timeline: RequestTimeline,
    ) -> None:
        """`source` feeds the stage, `row_sink` takes its own embeddings. `on_skip`: see `skip`."""
        self._request_id = request_id
        self._plan = plan
        self._take = take
        self._source = source
        self._row_sink = row_sink
        self._on_skip = on_skip
        self._timeline = timeline
        self._task: asyncio.Task[None] | None = None
        if source is None:
            timeline.mark_submitted(plan.handle.name)

    async def run(self) -> None:
        self._task = asyncio.current_task()
        async with self._plan.handle.life.needed():
            if self._source is not None:
                await self._source.has_rows.wait()
            await self._generate()

    def skip(self) -> None:
        """There is nothing for the stage to do: no embeddings of a generated token will come."""
        assert self._task is not None
        self._task.cancel()
        if self._on_skip is not None:
            self._on_skip()

    async def _generate(self) -> None:
        plan = self._plan
        stream = await plan.handle.open(
            self._request_id,
            plan.prompt,
            plan.params,
            self._row_sink,
            tokens_per_output=plan.tokens_per_output,
        )
        try:
            if self._source is not None:
                self._timeline.mark_submitted(plan.handle.name)
                self._source.connect(stream.engine_id)
            async with aclosing(stream.outputs()) as outputs:
                async for output in outputs:
                    self._take(output)
        finally:
            if self._source is not None:
                self._source.close()
            await stream.close()


class _ImageRun:
    """A prompt becomes an image."""

    def __init__(self, request_id: str, plan: ImagePlan, timeline: RequestTimeline, emit: Emit) -> None:
        self._request_id = request_id
        self._plan = plan
        self._timeline = timeline
        self._emit = emit

    async def run(self) -> None:
        decoder, prompt, timeline = self._plan.decoder, self._plan.prompt, self._timeline
        timeline.mark_submitted(decoder.first_stage)
        async with decoder.needed():
            result = await decoder.run(self._request_id, prompt.token_ids, prompt.payload, timeline=timeline)
        timeline.mark_output(decoder.name)
        # In a thread: an image of 2048x2048 takes 50 ms.
        self._emit(ImageDone(await asyncio.to_thread(_pixels, decoder.name, result, self._plan.size)))


def _pixels(stage: str, result: npt.NDArray[np.float32], size: ImageSize) -> npt.NDArray[np.uint8]:
    """Raises `CorruptDataError` for what is no image of that size."""
    if result.shape != (size.height, size.width, 3):
        raise CorruptDataError(stage, "shape", f"{list(result.shape)} is no RGB image of {size} pixels")
    if not (result.min() >= 0 and result.max() <= 1):  # NaN fails either comparison
        raise CorruptDataError(stage, "samples", "pixels that are not in [0, 1]")
    return np.rint(255 * result).astype(np.uint8)


class _AudioOutput:
    """Windows become audio at the rate of the API."""

    def __init__(self, request_id: str, plan: DecoderPlan, timeline: RequestTimeline, emit: Emit) -> None:
        self.speech = SpeechStream(
            request_id,
            decoder=plan.decoder,
            edge=plan.edge,
            scheduler=plan.scheduler,
            timeline=timeline,
            emit=self._take,
        )
        self._timeline = timeline
        self._emit = emit
        self._stage = plan.decoder.name
        self._resampler: Resampler | None = None
        if plan.sample_rate_hz != SAMPLE_RATE_HZ:
            self._resampler = Resampler(plan.sample_rate_hz, SAMPLE_RATE_HZ)
        self._num_samples = 0

    async def run(self) -> None:
        await self.speech.run()
        if self._resampler is not None:
            self._send(self._resampler.flush())

    def _take(self, delta: AudioDelta) -> None:
        self._send(delta.samples if self._resampler is None else self._resampler.push(delta.samples))

    def _send(self, samples: npt.NDArray[np.float32]) -> None:
        if samples.size:
            self._timeline.mark_output(self._stage)
            self._emit(AudioDelta(self._num_samples, samples))
            self._num_samples += samples.size


class _FrameOutput:
    """Tokens of a stage become frames, and these audio."""

    def __init__(
        self,
        stage: ArPlan,
        plan: DecoderPlan,
        speech: SpeechStream,
        timeline: RequestTimeline,
        emit: Emit,
    ) -> None:
        self._stage = stage
        self._plan = plan
        self._speech = speech
        self._timeline = timeline
        self._emit = emit
        self._rest: tuple[int, ...] = ()
        self.num_frames = 0
        """Frames that became audio."""
        self.finish_reason: FinishReason | None = None
        """Why the stage ended; None before that, and if there was nothing to speak."""

    def take(self, output: ArOutput) -> None:
        tokens = output.token_ids
        if output.finish_reason == "stop" and tokens and tokens[-1] in self._plan.stop_ids:
            tokens = tokens[:-1]
        width = self._plan.num_codebooks
        tokens = self._rest + tokens
        end = len(tokens) - len(tokens) % width  # a frame that was cut is not spoken
        self._rest = tokens[end:]
        frames = [tokens[i : i + width] for i in range(0, end, width)]
        if frames:
            self._timeline.mark_output(self._stage.handle.name)
            self.num_frames += len(frames)
            self._emit(CodecDelta(tokens[:end]))
            self._speech.push(frames)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self._speech.finish()


class _TextOutput:
    """Tokens of a stage become text, and say how much of it is spoken."""

    def __init__(
        self,
        stage: ArPlan,
        plan: TextPlan,
        feeder: RowFeeder | None,
        on_nothing_spoken: Callable[[], None] | None,
        timeline: RequestTimeline,
        emit: Emit,
    ) -> None:
        """`feeder` and `on_nothing_spoken` are given where the text is spoken."""
        self._stage = stage
        self._spoken_text = plan.spoken_text
        self._tool_parser = plan.tool_parser
        self._feeder = feeder
        self._on_nothing_spoken = on_nothing_spoken
        self._timeline = timeline
        self._emit = emit
        self._logprobs = ReleasedLogprobs()
        self._num_speakable_chars = 0
        self.num_tokens = 0
        self.num_cached = 0
        """Tokens of the prompt that came from the prefix cache."""
        self.finish_reason: FinishReason = "stop"

    def take(self, output: ArOutput) -> None:
        prompt = self._stage.prompt
        if isinstance(prompt, RenderedPrompt) and prompt.reply is not None:
            if output.finish_reason is not None:
                self._take_reply(prompt.token_ids[prompt.length :], prompt.reply)
            return
        self.num_tokens += len(output.token_ids)
        self.num_cached = output.num_cached_tokens
        if output.text or output.token_ids:
            self._timeline.mark_output(self._stage.handle.name)
        logprobs = self._logprobs.push(output.logprobs, output.text)
        if output.finish_reason is not None and not output.is_cut:
            logprobs += self._logprobs.rest()
        speakable = output.text
        if self._tool_parser is None:
            if output.text or output.token_ids:
                self._emit(TextDelta(output.text, output.token_ids, logprobs))
        else:
            speakable = self._parse(self._tool_parser, output, logprobs)
        if self._spoken_text is not None and self._feeder is not None:
            self._spoken_text.push(output.token_ids, speakable)
            self._feeder.allow(self._spoken_text.num_speakable())
        if output.finish_reason is not None:
            self._done(output.finish_reason)

    def _parse(self, parser: ToolParser, output: ArOutput, logprobs: tuple[SampledToken, ...]) -> str:
        """Prose and calls as events, the first with tokens and log-probabilities; returns what may be spoken
        of it."""
        pieces = parser.push(output.text)
        if output.finish_reason is not None:
            pieces += parser.finish()
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        if text or output.token_ids:
            self._emit(TextDelta(text, output.token_ids, logprobs))
        for piece in pieces:
            if isinstance(piece, ToolCallDelta):
                self._emit(piece)
        before, self._num_speakable_chars = self._num_speakable_chars, parser.num_speakable
        return text[: parser.num_speakable - before]

    def _take_reply(self, token_ids: tuple[int, ...], text: str) -> None:
        """All rows of the given reply have come; the token that was sampled behind it is not part of it."""
        self.num_tokens = len(token_ids)
        self._timeline.mark_output(self._stage.handle.name)
        self._emit(TextDelta(text, token_ids))
        self._done("stop", num_without_row=0)

    def _done(self, reason: FinishReason, *, num_without_row: int = 1) -> None:
        """The last token of a text was sampled but never computed, so it has no row: the text-end row stands
        in its place."""
        has_calls = self._tool_parser is not None and self._tool_parser.num_calls > 0
        self.finish_reason = "tool_calls" if has_calls and reason == "stop" else reason
        self._emit(TextDone(reason))
        if self._feeder is None or self._on_nothing_spoken is None:
            return
        num_spoken = self.num_tokens - num_without_row
        if self._spoken_text is not None:
            num_spoken = min(num_spoken, self._spoken_text.num_speakable())
        num_rows = self._feeder.num_generated_rows
        if num_rows < num_spoken:
            # The next stage would wait for ever, or speak what this one did not say.
            detail = f"{num_rows} rows for {num_spoken} tokens"
            raise CorruptDataError(self._stage.handle.name, "row_sequence", detail)
        if num_spoken >= 1:
            self._feeder.finish(num_spoken)
        else:
            # Without the row of a token the next stage has not begun to generate, and will not.
            self._on_nothing_spoken()
