"""Speech on a simulated device in virtual time: when audio is sent, and how long a player would stall."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.engine.engine_handle import EngineLife
from omni_server.orchestrator.request_timeline import RequestTimeline
from omni_server.orchestrator.speech_scheduler import PendingStreams, SpeechScheduler
from omni_server.orchestrator.speech_stream import SpeechStream
from omni_server.protocol.images import StageEvent
from omni_server.types import SAMPLE_RATE_HZ, AudioDelta
from stages.qwen2_5_omni.codec_window import CodecWindow
from stages.qwen2_5_omni.options import Code2WavChunks
from stages.qwen2_5_omni.talker_to_code2wav import Code2WavLayout, TalkerToCode2Wav
from tests.unit.orchestrator.virtual_time import clock

FULL_SCALE = 2**24
"""float32 is exact to here."""
LAYOUT = Code2WavLayout(frames_per_block=12, samples_per_frame=480, mel_frames_per_code=2)


@dataclass(frozen=True)
class Call:
    """One requested window."""

    window_id: str
    priority: int
    at: float
    stream: str | None
    num_streams: int | None


@dataclass(order=True)
class WaitingWindow:
    """A window that has not started."""

    priority: int
    number: int
    """In order of arrival."""
    request_id: str = field(compare=False)
    num_codes: int = field(compare=False)
    """Including context; counts against `max_codes`."""
    num_computed: int = field(compare=False)
    """Without codes whose state the stream carries."""
    done: asyncio.Future[None] = field(compare=False)


class SimulatedCode2Wav:
    """Replaces `DiffusionHandle`. Computes waiting windows in steps, by priority. A step takes a fixed time
    plus a time per codec token, except tokens whose state a stream carries. Sample values are positions in
    the stream."""

    def __init__(self, *, step_s: float = 0.0, code_s: float = 0.0, max_codes: int = 2048) -> None:
        self.name = self.stage = "code2wav"
        self.life = EngineLife(self.name)
        self.calls: list[Call] = []
        self.computed: list[str] = []
        self.num_running = 0
        self.most_running: dict[str, int] = {}
        self.errors: dict[str, Exception] = {}
        self.num_missing = 0
        self._running: dict[str, int] = {}
        self._step_s, self._code_s = step_s, code_s
        self.max_codes = max_codes
        self._waiting: list[WaitingWindow] = []
        self._order = itertools.count()
        self._stepping: asyncio.Task[None] | None = None

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
        stream = request_id.rpartition("-")[0]
        window = CodecWindow.decode(payload)
        assert len(token_ids) <= self.max_codes, "no step has room for it"
        num_carried = 0 if window.stream is None else window.emit_start - window.first_code
        self.calls.append(Call(request_id, priority, clock(), window.stream, num_streams))
        self._running[stream] = self._running.get(stream, 0) + 1
        self.most_running[stream] = max(self.most_running.get(stream, 0), self._running[stream])
        self.num_running += 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = WaitingWindow(
            priority, next(self._order), request_id, len(token_ids), len(token_ids) - num_carried, done
        )
        heapq.heappush(self._waiting, waiting)
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        try:
            await done
        finally:
            self.num_running -= 1
            self._running[stream] -= 1
        if request_id in self.errors:
            raise self.errors[request_id]
        per_code = LAYOUT.samples_per_frame
        samples = np.arange(window.emit_start * per_code, window.emit_end * per_code, dtype=np.float32)
        return samples[self.num_missing :] / FULL_SCALE

    def slow_down(self, factor: float) -> None:
        """Steps take `factor` times as long from now on."""
        self._step_s, self._code_s = self._step_s * factor, self._code_s * factor

    async def _step(self) -> None:
        await self._gather()
        while self._waiting:
            batch, room = [], self.max_codes
            while self._waiting and self._waiting[0].num_codes <= room:
                batch.append(heapq.heappop(self._waiting))
                room -= batch[-1].num_codes
            await self._compute(batch)
            for window in batch:
                self.computed.append(window.request_id)
                if not window.done.cancelled():
                    window.done.set_result(None)

    async def _gather(self) -> None:
        """Runs before the first step after an idle time."""
        await asyncio.sleep(0)  # windows requested at the same time form one batch

    async def _compute(self, batch: list[WaitingWindow]) -> None:
        await asyncio.sleep(self._step_s + self._code_s * sum(window.num_computed for window in batch))


@dataclass
class Utterance:
    """One speech stream; `pieces` are its audio deltas with their send times."""

    output: SpeechStream
    began: float
    pieces: list[tuple[float, AudioDelta]] = field(default_factory=list)

    @property
    def first_audio_s(self) -> float:
        """From the stream's start."""
        return self.pieces[0][0] - self.began

    @property
    def stall_s(self) -> float:
        """Total time that a player stalls if it starts at the first audio."""
        start = self.pieces[0][0]
        return max(at - (start + delta.first_sample / SAMPLE_RATE_HZ) for at, delta in self.pieces)


class Simulation:
    """A server's speech: one device, one scheduler, any number of streams."""

    def __init__(self, code2wav: SimulatedCode2Wav, plan: ChunkPlan | None = None) -> None:
        self.code2wav = code2wav
        self._plan = Code2WavChunks.model_validate({} if plan is None else plan.model_dump())
        self.scheduler = SpeechScheduler(self._plan, LAYOUT, PendingStreams(), clock=clock)

    def utterance(self, name: str, caller: str = "") -> Utterance:
        pieces: list[tuple[float, AudioDelta]] = []
        output = SpeechStream(
            name,
            decoder=cast(DiffusionHandle, self.code2wav),
            edge=TalkerToCode2Wav(self._plan, LAYOUT, voice="Ethan", noise_seed=0),
            scheduler=self.scheduler,
            layout=LAYOUT,
            timeline=RequestTimeline(clock),
            emit=lambda delta: pieces.append((clock(), delta)),
            caller=caller,
        )
        return Utterance(output, clock(), pieces)

    async def speak(self, name: str, num_codes: int, code_s: float = 0.0, caller: str = "") -> Utterance:
        """Runs a whole stream; the talker makes one code every `code_s` seconds."""
        utterance = self.utterance(name, caller)
        speaking = asyncio.create_task(utterance.output.run())
        if code_s:
            for number in range(num_codes):
                await asyncio.sleep(code_s)
                utterance.output.push([(number,)])
        else:
            utterance.output.push([(code,) for code in range(num_codes)])
        utterance.output.finish()
        await speaking
        return utterance


def is_whole(utterance: Utterance, num_codes: int) -> bool:
    """Whether each sample arrives once, in order."""
    sound = np.concatenate([delta.samples for _, delta in utterance.pieces])
    position = 0
    for _, delta in utterance.pieces:
        if delta.first_sample != position:
            return False
        position += len(delta.samples)
    return bool(np.array_equal(sound * FULL_SCALE, np.arange(num_codes * LAYOUT.samples_per_frame)))
