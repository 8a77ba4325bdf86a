"""Stages without engines. A test puts in what they send, and sees what they were given."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from vllm import SamplingParams

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.config.pipeline import TokenFrames
from omni_server.engine.ar_handle import ArHandle
from omni_server.engine.ar_stream import ArOutput
from omni_server.engine.async_engine import RowSink
from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.engine.engine_handle import EngineHandle, EngineLife, Stage
from omni_server.engine.feed_outbox import FeedOutbox
from omni_server.engine.prompt_rendering import RenderedPrompt
from omni_server.errors import CorruptDataError
from omni_server.family import TextRows
from omni_server.family.codec import CodecLayout, DecoderWindow, Frame
from omni_server.metrics.replica_name import split_replica_name
from omni_server.orchestrator.fair_share import FairShareQueue
from omni_server.orchestrator.orchestrator import Orchestrator
from omni_server.orchestrator.request_run import RequestRun
from omni_server.orchestrator.row_feeder import RowFeeder, TextRowFeeder
from omni_server.orchestrator.speech_decoding import SpeechDecoding
from omni_server.orchestrator.speech_scheduler import PendingStreams, SpeechScheduler
from omni_server.orchestrator.speech_tasks import ArTask, AudioTask, TextOutput
from omni_server.orchestrator.spoken_text import SpokenText
from omni_server.orchestrator.tool_parser import ToolParser
from omni_server.protocol.images import StageEvent
from omni_server.protocol.rows import AddressedFeed, RowsFeed, RowsPayload, Segment, SharedBlock
from omni_server.types import Finished, FinishReason, OmniEvent, OmniRequest, PromptTokens, SampledToken

PROMPT_IDS = (11, 12, 13)
NUM_PROMPT = len(PROMPT_IDS)
FIRST_GENERATED = NUM_PROMPT + 1
"""Row of the first generated token in the talker's sequence: behind the prompt and the voice's row."""
STOP_CODE = 99
CODES_PER_WINDOW = 2
CODES_PER_OUTPUT = 12
SAMPLES_PER_CODE = 10
ONE_CODEBOOK = TokenFrames()


class FakeStream:
    """Stands for `ArStream`."""

    def __init__(self, engine_id: str, row_sink: RowSink | None, tokens_per_output: tuple[int, ...]) -> None:
        self.engine_id = engine_id
        self.row_sink = row_sink
        self.tokens_per_output = tokens_per_output
        self.feeds: list[RowsFeed] = []
        self.num_closed = 0
        self._coming: asyncio.Queue[ArOutput | Exception] = asyncio.Queue()

    def send(
        self,
        *token_ids: int,
        text: str = "",
        finish: FinishReason | None = None,
        logprobs: tuple[SampledToken, ...] = (),
        is_cut: bool = False,
        predicted: Sequence[Sequence[int]] | None = None,
    ) -> None:
        codes = None if predicted is None else np.array(predicted, np.int16)
        self._coming.put_nowait(
            ArOutput(
                token_ids,
                text,
                finish,
                num_cached_tokens=2,
                logprobs=logprobs,
                is_cut=is_cut,
                predicted=codes,
            )
        )

    def fail(self, error: Exception) -> None:
        self._coming.put_nowait(error)

    async def outputs(self) -> AsyncGenerator[ArOutput, None]:
        while True:
            output = await self._coming.get()
            if isinstance(output, Exception):
                raise output
            yield output
            if output.finish_reason is not None:
                return

    async def close(self) -> None:
        self.num_closed += 1


class FakeEngine:
    """Stands for an `EngineHandle`."""

    leave = EngineHandle.leave

    def __init__(self, name: str) -> None:
        self.name = name
        self.stage, number = split_replica_name(name)
        self.number = int(number or 0)
        self.num_requests = 0
        self.is_draining = False
        self.life = EngineLife(name)

    @property
    def is_dead(self) -> bool:
        return self.life.reason is not None


class FakeArStage(FakeEngine):
    """Stands for `ArHandle`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.streams: list[FakeStream] = []
        self.open_error: Exception | None = None
        self.open_gate = asyncio.Event()
        self.open_gate.set()
        self.prompts: list[RenderedPrompt | tuple[int, ...]] = []
        self.params: list[SamplingParams] = []
        self.priorities: list[int] = []
        self.dropped: list[SharedBlock] = []
        self.outbox = FeedOutbox(self.feed, self.dropped.append, list[str]().append)

    @property
    def stream(self) -> FakeStream:
        (stream,) = self.streams
        return stream

    async def open(
        self,
        request_id: str,
        prompt: RenderedPrompt | tuple[int, ...],
        params: SamplingParams,
        row_sink: RowSink | None = None,
        *,
        tokens_per_output: tuple[int, ...] = (1,),
        priority: int = 0,
    ) -> FakeStream:
        await self.open_gate.wait()
        if self.open_error is not None:
            raise self.open_error
        self.priorities.append(priority)
        self.prompts.append(prompt)
        self.params.append(params)
        self.streams.append(FakeStream(f"{self.name}-{len(self.streams)}", row_sink, tokens_per_output))
        return self.streams[-1]

    async def feed(self, feeds: Sequence[AddressedFeed]) -> None:
        for engine_id, feed in feeds:
            (stream,) = [stream for stream in self.streams if stream.engine_id == engine_id]
            stream.feeds.append(feed)


def sound_of(*codes: int) -> npt.NDArray[np.float32]:
    """Of codes below 1000."""
    return np.repeat(np.array(codes, np.float32) / 1000, SAMPLES_PER_CODE)


class FakeCode2Wav(FakeEngine):
    """Stands for `DiffusionHandle`. A window sounds like its codes."""

    def __init__(self, name: str = "code2wav") -> None:
        super().__init__(name)
        self.request_ids: list[str] = []
        self.running = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.sound: npt.NDArray[np.float32] | None = None
        """Of every window, whatever its codes."""

    async def run(
        self,
        request_id: str,
        token_ids: tuple[int, ...],
        payload: bytes,
        *,
        priority: int = 0,
        num_streams: int | None = None,
        on_event: Callable[[StageEvent], None] | None = None,
    ) -> npt.NDArray[np.float32]:
        self.request_ids.append(request_id)
        self.running += 1
        try:
            await self.gate.wait()
            if self.sound is not None:
                return self.sound
            return sound_of(*token_ids)
        finally:
            self.running -= 1


class FakeCodecEdge:
    """Windows of two codes, the first ones of their frames, and a last window of what is left."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self._codes: list[int] = []
        self._emitted = 0
        self.misplaced_by = 0
        """Samples by which every window that is cut from now on begins too late."""
        self.num_samples: int | None = None
        """Of every window, whatever its codes."""
        self.keeps_the_rest = False
        """What is left for the last window does not come."""

    def use_ramp(self, new_blocks: Sequence[int]) -> None:
        assert not self._emitted

    def push(self, frames: Sequence[Frame]) -> list[DecoderWindow]:
        self.frames += frames
        self._codes += [frame[0] for frame in frames]
        return self._cut(whole=True)

    def flush(self) -> list[DecoderWindow]:
        return self._cut(whole=False)

    def finish(self) -> list[DecoderWindow]:
        return [] if self.keeps_the_rest else self._cut(whole=False)

    def _cut(self, *, whole: bool) -> list[DecoderWindow]:
        windows = []
        while self._emitted < len(self._codes):
            codes = tuple(self._codes[self._emitted : self._emitted + CODES_PER_WINDOW])
            if whole and len(codes) < CODES_PER_WINDOW:
                break
            first = self._emitted * SAMPLES_PER_CODE
            first += self.misplaced_by
            is_varied = len(set(codes)) > 1
            num_samples = len(codes) * SAMPLES_PER_CODE if self.num_samples is None else self.num_samples
            windows.append(DecoderWindow(codes, b"", first, num_samples, len(codes), is_varied))
            self._emitted += len(codes)
        return windows


class ReadRun:
    """A request and its events. Leaving the iteration ends it."""

    run: RequestRun

    def __init__(self) -> None:
        self._events: asyncio.Queue[OmniEvent | Exception] = asyncio.Queue()
        self.deliver = self._events.put_nowait
        self._is_over = False

    async def __aiter__(self) -> AsyncGenerator[OmniEvent, None]:
        try:
            while not self._is_over:
                event = await self._events.get()
                self._is_over = isinstance(event, Finished | Exception)
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        await self.run.aclose()


async def submit(
    orchestrator: Orchestrator, request: OmniRequest, pinned_engine: EngineHandle | None = None
) -> ReadRun:
    read = ReadRun()
    read.run = await orchestrator.submit(request, read.deliver, pinned_engine)
    return read


@dataclass
class Stages:
    """A request's surroundings. `blocks` are the references to shared memory that the thinker has sent."""

    thinker: FakeArStage = field(default_factory=lambda: FakeArStage("thinker"))
    talker: FakeArStage = field(default_factory=lambda: FakeArStage("talker"))
    code2wav: FakeCode2Wav = field(default_factory=FakeCode2Wav)
    blocks: list[SharedBlock] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    corrupt: list[CorruptDataError] = field(default_factory=list)
    edge: FakeCodecEdge = field(default_factory=FakeCodecEdge)

    @property
    def dropped(self) -> list[SharedBlock]:
        return self.talker.dropped

    audio: AudioTask = field(init=False, compare=False)
    """Of the last request that speaks."""

    def run(
        self,
        *,
        speech: bool = True,
        deadline_s: float = 30.0,
        detokenize: Callable[[Sequence[int]], str] | None = None,
        tool_parser: ToolParser | None = None,
        must_end: bool = False,
        reply: tuple[int, ...] | None = None,
        frames: TokenFrames = ONE_CODEBOOK,
        text_rows: TextRows | None = None,
    ) -> ReadRun:
        """`reply` are the tokens of a given text, "given". With `text_rows`, text reaches the talker as ids;
        its prompt has one more position than they."""
        prompt = RenderedPrompt(PROMPT_IDS, None)
        if reply is not None:
            prompt = RenderedPrompt(PROMPT_IDS + reply, None, "given", len(reply))
        read, speaker = ReadRun(), None
        run = read.run = RequestRun("request", FairShareQueue().take("caller"), read.deliver)
        if speech:
            audio = self.audio = AudioTask(
                run,
                "talker",
                decoding=self.decoding(frames),
                edge=self.edge,
                stop_ids=(STOP_CODE,),
                must_end=must_end,
            )
            talker = Stage("talker", [cast(ArHandle, self.talker)])
            talker_prompt = (8,) * NUM_PROMPT + (6, 7)
            is_limited = detokenize is not None
            feeder = RowFeeder(self.talker.outbox.drop, num_first_rows=FIRST_GENERATED, is_limited=is_limited)
            if text_rows is not None:
                feeder = TextRowFeeder(self.talker.outbox.drop, text_rows, is_limited=is_limited)
                talker_prompt = (8,) * (len(text_rows.row_ids) + 1)
            run.add(audio)
            speaker = run.add(ArTask(run, talker, talker_prompt, SamplingParams(), audio, source=feeder))
        text = TextOutput(
            run,
            "thinker",
            prompt,
            spoken_text=None if detokenize is None else SpokenText(detokenize),
            tool_parser=tool_parser,
            speaker=speaker,
        )
        thinker = Stage("thinker", [cast(ArHandle, self.thinker)])
        entry = run.choose(thinker)
        run.add(ArTask(run, thinker, prompt, SamplingParams(), text, speaker=speaker, handle=entry))
        run.start(
            PromptTokens(NUM_PROMPT, NUM_PROMPT, 0, 0, 0),
            deadline_s=deadline_s,
            is_logged=True,
            on_corrupt=self.corrupt.append,
            on_end=self.ended.append,
        )
        return read

    def decoding(self, frames: TokenFrames) -> SpeechDecoding:
        pending, plan = PendingStreams(), ChunkPlan(max_start_delay_s=0)
        scheduler = SpeechScheduler(plan, CodecLayout(CODES_PER_WINDOW, SAMPLES_PER_CODE), pending)
        return SpeechDecoding(
            decoder=Stage("code2wav", [cast(DiffusionHandle, self.code2wav)]),
            factory=lambda *_, **__: self.edge,
            chunks=plan,
            layout=CodecLayout(CODES_PER_OUTPUT, SAMPLES_PER_CODE),
            frames=frames,
            schedulers={"code2wav": scheduler},
            pending=pending,
        )

    def rows(self, *, num_generated: int) -> None:
        """The rows of one step, as the thinker's client delivers them."""
        sink = self.thinker.stream.row_sink
        assert sink is not None
        sink(self.payload(num_generated=num_generated))

    def payload(self, *, num_generated: int) -> RowsPayload:
        """The rows of one step: of the prompt if no token's row is among them."""
        first = num_generated + NUM_PROMPT if num_generated else 0
        block = SharedBlock(len(self.blocks), 1, 0)
        self.blocks.append(block)
        count = 1 if num_generated else FIRST_GENERATED
        return RowsPayload(NUM_PROMPT, num_generated, 4, "float32", block, (Segment(first, count, 0),))

    def token(self, number: int, text: str = "", finish: FinishReason | None = None) -> None:
        """Step `number` of the thinker: rows of the token before, then token `number`."""
        self.rows(num_generated=number)
        self.thinker.stream.send(100 + number, text=text or f"t{number} ", finish=finish)

    def fed_blocks(self) -> list[SharedBlock]:
        return [
            feed.payload.block
            for stream in self.talker.streams
            for feed in stream.feeds
            if feed.payload is not None and isinstance(feed.payload.block, SharedBlock)
        ]

    def is_released(self) -> bool:
        """Every stream closed once, every reference handed on or dropped exactly once, the end reported
        once."""
        streams = self.thinker.streams + self.talker.streams
        passed_on = sorted(self.fed_blocks() + self.dropped, key=lambda block: block.slot)
        return (
            all(stream.num_closed == 1 for stream in streams)
            and passed_on == self.blocks
            and self.code2wav.running == 0
            and [one.num_requests for one in (self.thinker, self.talker, self.code2wav)] == [0, 0, 0]
            and len(self.thinker.prompts) <= 1
            and self.ended == ["request"]
        )


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(50):
        await asyncio.sleep(0)


async def collected(run: ReadRun) -> list[OmniEvent]:
    return [event async for event in run]


def asked(**options: Any) -> tuple[Stages, asyncio.Task[list[OmniEvent]]]:
    """A request (see `Stages.run`), whose events are collected."""
    stages = Stages()
    return stages, asyncio.create_task(collected(stages.run(**options)))


def kinds(events: Sequence[OmniEvent]) -> list[str]:
    return [type(event).__name__ for event in events]


def only(kind: type, events: Sequence[OmniEvent]) -> OmniEvent:
    (event,) = (event for event in events if isinstance(event, kind))
    return event


async def write(stages: Stages, num_tokens: int) -> None:
    """The thinker's whole reply; its last token is the end token."""
    await settle()
    for number in range(num_tokens):
        stages.token(number, finish="stop" if number == num_tokens - 1 else None)
        await settle()
