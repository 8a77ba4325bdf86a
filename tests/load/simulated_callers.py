"""Simulates, in virtual time, callers of a server whose three stages share one GPU, to predict the effect of
rules and settings.

The orchestrator's part is real: windows, their order, the start of playback. The engines are reduced to their
steps: how long each takes on an otherwise idle GPU, and how concurrent steps slow each other down. Batches
form as in the engines: a language model's step includes every request that has its input, a code2wav step
the windows that are due first. Cooperation between stages is modelled too: the waits that let requests batch.

`benchmarks/scheduler.md` compares the results with measurements on an H200.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Literal

from omni_server.config.chunk_plan import ChunkPlan, output_ends
from tests.unit.orchestrator.simulated_speech import (
    LAYOUT,
    SimulatedCode2Wav,
    Simulation,
    Utterance,
    WaitingWindow,
)
from tests.unit.orchestrator.virtual_time import clock, run

CODES_PER_S = 50
CODES_PER_TEXT_TOKEN = 250 / 64
"""In workload W1, and for other lengths of answers."""
W1_CODES = 250

START_DISTANCE_S = 0.00015
"""Measured between the first requests of callers that start together."""

Workload = Literal["w1", "mixed", "poisson", "bursts"]
"""`w1`: closed loop, each caller sends its next request right after an answer; answers of 5 s. `mixed`: the
same with answers of 2 to 9 s. `poisson`: answers of 2 to 9 s, independent arrivals at the rate for the number
of callers (`POISSON_RATES`). `bursts`: all callers' requests at the same time, answers of 2 to 9 s, and the
next burst a second after the last answer."""

POISSON_RATES = {1: 1.0, 4: 3.2, 8: 5.0, 16: 7.0, 24: 8.0, 32: 8.8, 64: 9.6}
"""Requests per second. About 0.8 of the closed-loop throughput of as many callers, in seconds of audio, so
that about as many requests are active."""


@dataclass(frozen=True)
class Device:
    """One H200 with the sizes of Qwen2.5-Omni-7B. Times are seconds on an otherwise idle GPU, as measured
    (docs/performance.md, benchmarks/history.md), unless marked as fitted (benchmarks/scheduler.md says to
    what)."""

    solver: tuple[tuple[float, float], ...] = ((2, 0.029), (11, 0.036), (33, 0.058), (91, 0.139))
    """code2wav's solver, by blocks computed in a step."""
    vocoder_s: tuple[float, float] = (0.0021, 0.00033)
    """Per step, and per block in it; 0.0002 was measured on long crops, the rest is margins. Fitted."""
    code2wav_host_s: float = 0.004
    """From a window's arrival to the first kernel, and from the last kernel to the server. Fitted."""
    contention: dict[str, tuple[float, float]] = field(
        default_factory=lambda: {"talker": (0.017, 0.23), "thinker": (0.042, 0.505), "both": (0.077, 0.39)}
    )
    """Slowdown of a code2wav step by constantly busy language models: seconds, and a share of its time alone.
    A first window is hundreds of small kernels that each wait their turn, so most of it does not depend on
    the step's size."""
    contention_scale: tuple[float, float] = (0.4, 1.55)
    """Corrects both parts of `contention`, measured with slower language models. Fitted."""
    thinker_share: float = 0.6
    """Of the GPU left by code2wav, if both models compute. Fitted."""
    sharing_gain: tuple[tuple[float, float], ...] = ((0.035, 1.5), (0.16, 0.88))
    """By length of a code2wav step in seconds: total rate of language models beside it, as a multiple of what
    it leaves them. Its small kernels do not fill the GPU. Constant beyond both ends. Fitted."""
    thinker_s: tuple[float, float] = (0.00404, 0.000034)
    """A decode step, and each row in it."""
    thinker_host_s: tuple[float, float] = (0.0041, 0.000062)
    """Minimum time between decode steps, plus time per row: text alone, 236 to 8,095 tokens/s."""
    prompt_s: float = 0.003
    """Per 90-token prompt in a thinker step."""
    many_prompts: tuple[int, float] = (5, 0.030)
    """Steps with more prompts exceed the CUDA graphs (512 tokens) and add this host time."""
    talker_s: tuple[float, float] = (0.00133, 0.000007)
    """A decode step, and each row in it."""
    talker_host_s: tuple[float, float] = (0.00123, 0.00002)
    """Minimum time between decode steps, plus time per row. The second is fitted."""
    talker_prompt_s: float = 0.0021
    """Per prompt in a talker step. Fitted."""
    accept_s: float = 0.003
    """The server's serial work per request. Fitted to the time to first text."""
    network_s: float = 0.0064
    """Round trip to the server, plus server work that does not delay other requests. Fitted likewise."""
    row_s: float = 0.001
    """From the end of a thinker step to the talker's scheduler."""
    noise: float = 0.06
    """Random variation of code2wav step times, as a fraction."""
    hiccup: tuple[float, float] = (0.02, 0.05)
    """Probability of a slow code2wav step, and its extra seconds."""

    def code2wav_s(self, blocks: float) -> float:
        step_s, block_s = self.vocoder_s
        return interpolated(self.solver, blocks) + step_s + block_s * blocks

    def rates(self, steps: dict[str, float]) -> dict[str, float]:
        """Speed of each concurrent step; 1 is alone. `steps`: by stage, its seconds alone."""
        models = sorted(steps.keys() - {"code2wav"})
        shares = dict.fromkeys(models, 1.0)
        if len(models) == 2:
            shares = {"thinker": 0.5, "talker": 0.5}
        if "code2wav" not in steps:
            return shares
        if not models:
            return {"code2wav": 1.0}
        if len(models) == 2:
            shares = {"thinker": self.thinker_share, "talker": 1 - self.thinker_share}
        step_s = steps["code2wav"]
        fixed_s, share = self.contention["both" if len(models) == 2 else models[0]]
        extra_s = self.contention_scale[0] * fixed_s + self.contention_scale[1] * share * step_s
        rate = step_s / (step_s + extra_s)
        (least_s, _), (most_s, _) = self.sharing_gain
        left = (1 - rate) * interpolated(self.sharing_gain, min(max(step_s, least_s), most_s))
        return {"code2wav": rate} | {name: share * left for name, share in shares.items()}


def interpolated(points: tuple[tuple[float, float], ...], at: float) -> float:
    """Linear interpolation; extrapolates the first and the last line."""
    lines = list(pairwise(points))
    (x0, y0), (x1, y1) = next((line for line in lines if at <= line[1][0]), lines[-1])
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


@dataclass(frozen=True)
class SharingRules:
    """How stages cooperate on a shared GPU (`stages.runtime.batching_delay`)."""

    waits_for_windows: bool = True
    """An idle code2wav waits 1 ms after a window for others, at most 6 ms."""
    waits_for_prompts: bool = True
    """An idle thinker waits 2 ms after a prompt for others, at most 8 ms."""
    catches_up: bool = True
    """Simultaneous speech requests reach the thinker together."""


@dataclass
class _Step:
    alone_s: float
    left_s: float
    done: asyncio.Future[None]


class SharedGpu:
    """Runs concurrent steps of stages at the device's rates."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._steps: dict[str, _Step] = {}
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def compute(self, stage: str, seconds: float) -> None:
        """Runs a step of `seconds` alone; each stage has one."""
        self._advance()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._steps[stage] = _Step(seconds, seconds, done)
        self._plan()
        await done

    def _rates(self) -> dict[str, float]:
        return self._device.rates({name: step.alone_s for name, step in self._steps.items()})

    def _advance(self) -> None:
        now = clock()
        if self._steps:
            for name, rate in self._rates().items():
                self._steps[name].left_s -= (now - self._at) * rate
        self._at = now

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._steps:
            rates = self._rates()
            next_s = min(step.left_s / rates[name] for name, step in self._steps.items())
            self._timer = asyncio.get_running_loop().call_later(max(next_s, 0.0), self._step_ends)

    def _step_ends(self) -> None:
        self._advance()
        for name, step in list(self._steps.items()):
            if step.left_s <= 1e-9:
                del self._steps[name]
                if not step.done.done():
                    step.done.set_result(None)
        self._plan()


class Code2Wav(SimulatedCode2Wav):
    """Shares its GPU with language models."""

    def __init__(
        self, gpu: SharedGpu, device: Device, sharing: SharingRules, max_codes: int, rng: random.Random
    ) -> None:
        super().__init__(max_codes=max_codes)
        self._gpu, self._device, self._sharing, self._rng = gpu, device, sharing, rng
        self._ended_at = float("-inf")

    async def _gather(self) -> None:
        await asyncio.sleep(0)
        if not self._sharing.waits_for_windows or self.calls[-1].num_streams == 1:
            return
        if clock() < self._ended_at + 0.0005:  # these windows waited for the last step to end
            return
        latest, num_seen = clock() + 0.006, 0
        while num_seen < len(self._waiting) and clock() < latest:
            num_seen = len(self._waiting)
            await asyncio.sleep(0.001)

    async def _compute(self, batch: list[WaitingWindow]) -> None:
        device, rng = self._device, self._rng
        await asyncio.sleep(device.code2wav_host_s / 2)
        seconds = device.code2wav_s(sum(window.num_computed for window in batch) / LAYOUT.frames_per_block)
        seconds *= 1 + device.noise * rng.uniform(-1, 1)
        seconds += device.hiccup[1] * (rng.random() < device.hiccup[0])
        await self._gpu.compute("code2wav", seconds)
        self._ended_at = clock()
        await asyncio.sleep(device.code2wav_host_s / 2)


@dataclass(eq=False)
class Request:
    """One answer on its way through the language models."""

    num_text: int
    num_codes: int
    take_codes: Callable[[int], None]
    """Called per output with its number of codes."""
    output_ends: Iterator[int]
    """In blocks; see `omni_server.config.chunk_plan`."""
    asked_at: float = 0.0
    first_text_at: float = 0.0
    num_written: int = 0
    num_rows: int = 0
    num_made: int = 0
    num_sent: int = 0
    is_prefilled: bool = False
    text_done: asyncio.Event = field(default_factory=asyncio.Event)
    codes_done: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.output_end = next(self.output_ends)

    @property
    def may_talk(self) -> bool:
        has_row = self.num_rows >= self.num_text or self.num_made < self.num_rows
        return self.num_rows > 0 and has_row


class LanguageModel:
    """Runs serial steps of all requests that have their input."""

    def __init__(self, name: str, gpu: SharedGpu) -> None:
        self._name, self._gpu = name, gpu
        self.requests: list[Request] = []
        self._woken = asyncio.Event()

    def wake(self) -> None:
        self._woken.set()

    async def until_woken(self) -> None:
        self._woken.clear()
        await self._woken.wait()

    async def step(self, seconds: float, host_s: float) -> None:
        began = clock()
        await self._gpu.compute(self._name, seconds)
        await asyncio.sleep(max(0.0, began + host_s - clock()))


class Server:
    """The three engines and the orchestrator's speech."""

    def __init__(
        self, plan: ChunkPlan, device: Device, sharing: SharingRules, *, max_codes: int, rng: random.Random
    ) -> None:
        gpu = SharedGpu(device)
        self._device, self._sharing, self._rng = device, sharing, rng
        self.code2wav = Code2Wav(gpu, device, sharing, max_codes, rng)
        self.simulation = Simulation(self.code2wav, plan)
        self.thinker = LanguageModel("thinker", gpu)
        self.talker = LanguageModel("talker", gpu)
        self._prompts: list[Request] = []
        self._prompt_at = float("-inf")
        self._unprepared = 0
        self._prepared: list[Request] = []
        self._accepting = asyncio.Lock()
        self._names = count()

    async def work(self) -> None:
        """Runs until cancelled."""
        await asyncio.gather(self._think(), self._talk())

    async def answer(self, num_codes: int) -> tuple[Request, Utterance, float]:
        """Runs one caller's request; also returns the time at which it completed."""
        asked_at = clock()
        utterance = self.simulation.utterance(f"answer{next(self._names)}")
        speaking = asyncio.create_task(utterance.output.run())

        def take(num_new: int) -> None:
            utterance.output.push([(0,)] * num_new)

        num_text = max(2, round(num_codes / CODES_PER_TEXT_TOKEN))
        ends = output_ends(self.simulation.scheduler.blocks_per_output(may_pause=False))
        request = Request(num_text, num_codes, take, ends, asked_at)
        await asyncio.sleep(self._device.network_s)
        self._unprepared += 1
        async with self._accepting:
            await asyncio.sleep(self._device.accept_s * self._rng.uniform(0.9, 1.2))
        self._unprepared -= 1
        self._prepared.append(request)
        if not self._unprepared or not self._sharing.catches_up:
            self._prompts += self._prepared
            self._prepared.clear()
            self._prompt_at = clock()
            self.thinker.wake()
        await request.codes_done.wait()
        utterance.output.finish()
        await speaking
        return request, utterance, clock()

    async def _think(self) -> None:
        device, requests = self._device, self.thinker.requests
        while True:
            if not requests and not self._prompts:
                await self.thinker.until_woken()
                latest = clock() + 0.008
                while self._sharing.waits_for_prompts:
                    left_s = min(self._prompt_at + 0.002, latest) - clock()
                    if left_s <= 0:
                        break
                    await asyncio.sleep(left_s)
            prompts, self._prompts = self._prompts, []
            step_s, row_s = device.thinker_s
            host_s = device.thinker_host_s[0] + device.thinker_host_s[1] * len(requests)
            seconds = step_s + row_s * len(requests) + device.prompt_s * len(prompts)
            if len(prompts) > device.many_prompts[0]:
                host_s += device.many_prompts[1]
            await self.thinker.step(seconds, host_s)
            for request in prompts:
                request.first_text_at = clock()
                self.talker.requests.append(request)
            requests += prompts
            for request in requests:
                request.num_written += 1
            asyncio.get_running_loop().call_later(device.row_s, self._rows_come, tuple(requests))
            requests[:] = [request for request in requests if request.num_written < request.num_text]

    def _rows_come(self, requests: Iterable[Request]) -> None:
        for request in requests:
            request.num_rows += 1
        self.talker.wake()

    async def _talk(self) -> None:
        device, requests = self._device, self.talker.requests
        while True:
            batch = [request for request in requests if request.may_talk]
            if not batch:
                await self.talker.until_woken()
                continue
            num_prompts = sum(not request.is_prefilled for request in batch)
            seconds = (
                device.talker_s[0] + device.talker_s[1] * len(batch) + device.talker_prompt_s * num_prompts
            )
            await self.talker.step(seconds, device.talker_host_s[0] + device.talker_host_s[1] * len(batch))
            for request in batch:
                request.is_prefilled = True
                request.num_made += 1
                is_last = request.num_made == request.num_codes
                if is_last or request.num_made == request.output_end * LAYOUT.frames_per_block:
                    request.take_codes(request.num_made - request.num_sent)
                    request.num_sent, request.output_end = request.num_made, next(request.output_ends)
                if is_last:
                    requests.remove(request)
                    request.codes_done.set()


@dataclass
class Outcome:
    """Per answer, in seconds."""

    first_text_s: list[float] = field(default_factory=list)
    first_audio_s: list[float] = field(default_factory=list)
    end_to_end_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    gaps_s: list[list[float]] = field(default_factory=list)
    """Between the pieces of an answer."""
    slack_s: list[list[float]] = field(default_factory=list)
    """How long before it was needed each later piece arrived."""
    audio_s: float = 0.0
    wall_s: float = 0.0


def call(
    num_callers: int,
    plan: ChunkPlan,
    sharing: SharingRules | None = None,
    *,
    max_codes: int,
    answers: int = 4,
    device: Device | None = None,
    workload: Workload = "w1",
    seed: int = 1,
) -> Outcome:
    """Simulates `num_callers` (or bursts of as many, or their rate) with `answers` each, after `num_callers`
    uncounted W1 answers as a warm-up. `max_codes`: limit of a code2wav step."""
    rng = random.Random(seed)
    device = Device() if device is None else device
    sharing = SharingRules() if sharing is None else sharing
    outcome = Outcome()

    async def work() -> Outcome:
        server = Server(plan, device, sharing, max_codes=max_codes, rng=rng)

        async def answer() -> None:
            num_codes = W1_CODES if workload == "w1" else rng.randrange(2 * CODES_PER_S, 9 * CODES_PER_S + 1)
            request, utterance, ended = await server.answer(num_codes)
            start = utterance.pieces[0][0]
            outcome.first_text_s.append(request.first_text_at - request.asked_at)
            outcome.first_audio_s.append(start - request.asked_at)
            outcome.end_to_end_s.append(ended - request.asked_at)
            outcome.stall_s.append(max(0.0, utterance.stall_s))
            outcome.gaps_s.append([later - at for (at, _), (later, _) in pairwise(utterance.pieces)])
            outcome.slack_s.append(
                [start + delta.first_sample / 24_000 - at for at, delta in utterance.pieces[1:]]
            )
            outcome.audio_s += num_codes / CODES_PER_S

        async def all_callers() -> None:
            if workload == "poisson":
                async with asyncio.TaskGroup() as group:
                    for _ in range(answers * num_callers):
                        await asyncio.sleep(rng.expovariate(POISSON_RATES[num_callers]))
                        group.create_task(answer())
            elif workload == "bursts":
                for _ in range(answers):
                    await asyncio.gather(*(answer() for _ in range(num_callers)))
                    await asyncio.sleep(1.0)
            else:
                await asyncio.gather(*(caller(number) for number in range(num_callers)))

        async def caller(number: int) -> None:
            await asyncio.sleep(number * START_DISTANCE_S)
            for _ in range(answers):
                await answer()

        working = asyncio.create_task(server.work())
        await asyncio.gather(*(server.answer(W1_CODES) for _ in range(num_callers)))
        await asyncio.sleep(1.0)
        began = clock()
        await all_callers()
        outcome.wall_s = clock() - began
        working.cancel()
        return outcome

    return run(work)
