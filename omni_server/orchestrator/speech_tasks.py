"""The tasks of a request that speaks: its autoregressive stages, and what their tokens become."""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omni_server.audio.filters import Resampler
from omni_server.engine.ar_handle import ArHandle
from omni_server.engine.ar_stream import ArOutput
from omni_server.engine.engine_handle import Stage
from omni_server.engine.prompt_rendering import RenderedPrompt
from omni_server.engine.sampling import StageSampling
from omni_server.errors import CorruptDataError, EndlessSpeechError
from omni_server.family.codec import CodecEdge
from omni_server.orchestrator.released_logprobs import ReleasedLogprobs
from omni_server.orchestrator.request_run import RequestRun
from omni_server.orchestrator.row_feeder import RowFeeder
from omni_server.orchestrator.speech_decoding import SpeechDecoding
from omni_server.orchestrator.speech_stream import SpeechStream
from omni_server.orchestrator.spoken_text import SpokenText
from omni_server.orchestrator.text_source import TextSource, WrittenText
from omni_server.orchestrator.tool_parser import Piece, ToolParser
from omni_server.types import (
    SAMPLE_RATE_HZ,
    AudioDelta,
    CodecDelta,
    FinishReason,
    TextAlignment,
    TextDelta,
    ToolCallDelta,
)

SPOKEN_TOKENS_PER_OUTPUT = (1, 1, 1, 1, 2, 4)
"""For a text that crosses to a talker as ids. Each output costs CPU time of the server process, which limits
a server with several GPUs, and the talker speaks a token while the next ones are sampled. The first four come
alone, because they decide when first audio comes."""


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
        else:
            self.request.on_close.append(self.source.close)

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
            priority=self.request.ticket.number,
        )
        try:
            if self.source is not None:
                self.request.timeline.mark_submitted(self.stage.name)
                self.source.connect(handle.outbox, stream.engine_id)
            async with aclosing(stream.outputs()) as outputs:
                async for output in outputs:
                    self.output.take(output)
                    if self.output.is_over:
                        break
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
        must_end: bool = False,
    ) -> None:
        """`source` samples the tokens; every `num_sampled` consecutive tokens form a frame, with the codes
        predicted for them. `stop_ids` end the sequence and are not part of a frame. For
        `must_end`, see `SpeechOutput`."""
        layout = decoding.layout
        self._request = request
        self._source = source
        self._decoding = decoding
        self._edge = edge
        self._frames = decoding.frames
        self._stop_ids = stop_ids
        self._must_end = must_end
        self._max_frames: int | None = None
        self._text: TextSource | None = None
        self._is_aligned = False
        self.is_over = False
        self._speech: SpeechStream | None = None  # until there is a frame to decode, or the end
        self._has_begun = asyncio.Event()
        self._resampler: Resampler | None = None
        if layout.sample_rate_hz != SAMPLE_RATE_HZ:
            self._resampler = Resampler(layout.sample_rate_hz, SAMPLE_RATE_HZ)
        self._rest: tuple[int, ...] = ()
        self._num_samples = 0

    @property
    def _may_pause(self) -> bool:
        return self._text is not None and not self._text.is_whole

    @property
    def tokens_per_output(self) -> tuple[int, ...]:
        """See `ChunkPlan.blocks_per_output`."""
        blocks = self._decoding.chunks.blocks_per_output(may_pause=self._may_pause)
        per_block = self._decoding.layout.frames_per_block * self._decoding.frames.num_sampled
        return tuple(number * per_block for number in blocks)

    def follow(self, text: TextSource, *, is_aligned: bool) -> None:
        """The source reads `text`. `is_aligned`: report which of it each frame is given."""
        self._text, self._is_aligned = text, is_aligned

    def limit(self, num_frames: int) -> None:
        """Cuts the speech there, as the limit of its tokens does. The source samples the rest of its output."""
        self._max_frames = num_frames

    async def run(self) -> None:
        with self._decoding.pending.stream():
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
        if self._max_frames is not None:  # an output may be of several steps
            end = min(end, max(0, self._max_frames - self._request.num_frames) * width)
        frames = [tokens[i : i + width] for i in range(0, end, width)]
        if frames:
            self._request.timeline.mark_output(self._source)
            self._request.num_frames += len(frames)
            self._request.emit(CodecDelta(tokens[:end]))
            self._align(self._request.num_frames - len(frames))
            self._begun().push(frames)
        is_cut = self._max_frames is not None and self._request.num_frames >= self._max_frames
        if output.finish_reason is not None or is_cut:
            self.is_over = True
            self._request.is_speech_cut = is_cut or output.finish_reason != "stop"
            if self._request.is_speech_cut and self._must_end:
                raise EndlessSpeechError(self._source)
            self.finish()

    def finish(self) -> None:
        """Marks the end of the tokens; there may have been none."""
        self._begun().finish()

    def _align(self, first_frame: int) -> None:
        layout = self._decoding.layout
        for frame in range(first_frame, self._request.num_frames) if self._is_aligned else ():
            if self._text is not None and (text := self._text.given(frame)):
                end = layout.first_sample(frame + 1) * SAMPLE_RATE_HZ // layout.sample_rate_hz
                self._request.emit(TextAlignment(text, end))

    def _begun(self) -> SpeechStream:
        """The stream of windows. The first call chooses the decoder."""
        if self._speech is None:
            decoder = self._request.choose(self._decoding.decoder)
            text = self._text
            self._speech = SpeechStream(
                self._request.request_id,
                decoder=decoder,
                edge=self._edge,
                scheduler=self._decoding.schedulers[decoder.name],
                layout=self._decoding.layout,
                timeline=self._request.timeline,
                emit=self._take_audio,
                caller=self._request.ticket.caller,
                may_pause=self._may_pause,
                is_held=lambda: text is not None and text.is_awaited(self._request.num_frames),
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

    is_over = False

    def __init__(
        self,
        request: RequestRun,
        stage: str,
        prompt: RenderedPrompt,
        *,
        spoken_text: SpokenText | None = None,
        tool_parser: ToolParser | None = None,
        speaker: ArTask | None = None,
        written: WrittenText | None = None,
        tokens_per_output: tuple[int, ...] = (1,),
    ) -> None:
        """`speaker` is the stage that receives the embeddings of the text. `spoken_text` is set if a stop
        string may cut text that would otherwise be spoken, or if text may turn out to be a tool call.
        `tool_parser` is set if the model may call tools, `written` if another stage reads the text."""
        self._request = request
        self._stage = stage
        self._prompt = prompt
        self._spoken_text = spoken_text
        self._tool_parser = tool_parser
        self._speaker = speaker
        self._feeder = None if speaker is None else speaker.source
        self._written = written
        self.tokens_per_output = tokens_per_output
        self._logprobs = ReleasedLogprobs()
        self._num_spoken_chars = 0

    def take(self, output: ArOutput) -> None:
        if self._prompt.reply is not None:
            if output.finish_reason is not None:
                self._take_reply(self._prompt.token_ids[self._prompt.length :], self._prompt.reply)
            return
        self._request.num_text_tokens += len(output.token_ids)
        self._request.num_cached_tokens = output.num_cached_tokens
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
        if self._written is not None:
            self._written.push(self._spoken(text))
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
        self._request.num_text_tokens = len(token_ids)
        if self._feeder is not None:
            self._feeder.speak(token_ids)
        self._request.timeline.mark_output(self._stage)
        self._request.emit(TextDelta(text, token_ids))
        self._done("stop", num_without_row=0)

    def _done(self, reason: FinishReason, *, num_without_row: int) -> None:
        """Ends the text. Its last `num_without_row` tokens are not spoken: the text-end row replaces them."""
        has_calls = self._tool_parser is not None and self._tool_parser.num_calls > 0
        self._request.finish_reason = "tool_calls" if has_calls and reason == "stop" else reason
        if self._written is not None:
            self._written.finish()
        if self._speaker is None or self._feeder is None:
            return
        num_spoken = self._request.num_text_tokens - num_without_row
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
