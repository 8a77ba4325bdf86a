"""Callers of a server whose three stages share a GPU, in virtual time: what settings would do, before they
are tried.

The orchestrator's part is the real one: windows, their order, the gate before first audio. Of the stages only
the times are there. code2wav's step is a line over its codes, and slower while language models compute beside
it; the language models take turns with nobody and do not pause for first windows, but keep their distances.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from omni_server.config.chunk_plan import ChunkPlan
from stages.runtime.step_throttle import GAP_S, MAX_INTERVAL_S
from tests.unit.orchestrator.simulated_speech import LAYOUT, SimulatedCode2Wav, Simulation
from tests.unit.orchestrator.virtual_time import clock, run

CODE_SECONDS = 0.02
NUM_TEXT_TOKENS = 64  # of workload W1
NUM_CODES = 250
PREFILL_S = 0.09
SLICE_S = 0.02
"""After so long a running step looks again at what the language models do."""


@dataclass(frozen=True)
class Device:
    """Seconds on one H200 with the sizes of Qwen2.5-Omni-7B, as measured beside each other
    (docs/performance.md), but for the first two, which were chosen so that throughput at 16 and 64 callers
    comes out."""

    step_s: float = 0.025
    """A step of code2wav without any codes."""
    code_s: float = 0.000175
    """Each code in it."""
    thinker_step_s: float = 0.0095
    """From token to token beside code2wav, where nothing holds the thinker up."""
    talker_step_s: float = 0.0045
    alone: float = 0.6
    """Both take so much of that while code2wav does nothing."""
    thinker_load: tuple[float, float] = (0.7, 0.008)
    """By how much a thinker that never rests slows code2wav down, and how long its step keeps the GPU."""
    talker_load: tuple[float, float] = (0.3, 0.0025)
    noise: float = 0.06
    """A step may take so much more or less."""
    hiccup: tuple[float, float] = (0.02, 0.05)
    """How likely a step takes longer, and by how much."""


@dataclass(frozen=True)
class Distances:
    """Between the steps of the language models, in seconds."""

    per_stream_s: float = 0.0
    """While code2wav is at work, for each utterance under way (`step_interval_per_stream_ms`)."""
    thinker_full_s: float = 0.0
    """While code2wav's steps are three quarters full, as before that."""
    talker_full_s: float = 0.0


@dataclass
class Outcome:
    first_audio_s: list[float] = field(default_factory=list)
    end_to_end_s: list[float] = field(default_factory=list)
    underrun_s: list[float] = field(default_factory=list)
    slack_s: list[list[float]] = field(default_factory=list)
    """By answer and later window: how much earlier it came than it was needed."""
    audio_s: float = 0.0
    wall_s: float = 0.0


class SharedCode2Wav(SimulatedCode2Wav):
    """On a GPU that the language models use, too."""

    def __init__(self, device: Device, distances: Distances, max_codes: int, rng: random.Random) -> None:
        super().__init__(max_codes=max_codes)
        self._device, self._distances, self._rng = device, distances, rng
        self._largest = max_codes
        self._is_running = self._is_full = False
        self._ended_at = self._full_until = float("-inf")
        self.num_thinking = self.num_talking = 0
        self.num_streams: Callable[[], int] = lambda: 0
        """Utterances under way, of `Pacer`: those included that the talker is done with."""

    def thinker_s(self) -> float:
        """From one of the thinker's steps to the next, now."""
        return self._distance(self._device.thinker_step_s, self._distances.thinker_full_s)

    def talker_s(self) -> float:
        return self._distance(self._device.talker_step_s, self._distances.talker_full_s)

    def _distance(self, unhindered_s: float, full_s: float) -> float:
        now = clock()
        least = unhindered_s * (1.0 if self._is_running else self._device.alone)
        if (self._is_running and self._is_full) or now < self._full_until:
            least = max(least, full_s)
        if self._is_running or now < self._ended_at + GAP_S:
            least = max(least, min(self._distances.per_stream_s * self.num_streams(), MAX_INTERVAL_S))
        return least

    def _slowdown(self) -> float:
        slowdown = 1.0
        if self.num_thinking:
            load, busy_s = self._device.thinker_load
            slowdown += load * min(1.0, busy_s / self.thinker_s())
        if self.num_talking:
            load, busy_s = self._device.talker_load
            slowdown += load * min(1.0, busy_s / self.talker_s())
        return slowdown

    async def _compute(self, num_codes: int, num_computed: int) -> None:
        device, rng = self._device, self._rng
        left_s = (device.step_s + device.code_s * num_computed) * (1 + device.noise * rng.uniform(-1, 1))
        left_s += device.hiccup[1] * (rng.random() < device.hiccup[0])
        self._is_running, self._is_full = True, num_codes >= 0.75 * self._largest
        while left_s > 1e-6:
            slowdown = self._slowdown()
            seconds = min(SLICE_S, left_s * slowdown)
            await asyncio.sleep(seconds)
            left_s -= seconds / slowdown
        self._is_running, self._ended_at = False, clock()
        if self._is_full:
            self._full_until = self._ended_at + GAP_S


def call(
    num_callers: int,
    plan: ChunkPlan,
    distances: Distances,
    *,
    max_codes: int,
    answers: int = 4,
    device: Device | None = None,
    seed: int = 1,
) -> Outcome:
    """So many callers, each of whom asks for the next of its `answers` as soon as it has one; `max_codes` of
    a step."""
    rng = random.Random(seed)

    async def work() -> Outcome:
        code2wav = SharedCode2Wav(device or Device(), distances, max_codes, rng)
        simulation = Simulation(code2wav, plan.pacing, plan)
        code2wav.num_streams = lambda: simulation.pacer.num_streams
        outcome, numbers = Outcome(), count()

        async def answer() -> None:
            asked_at = clock()
            await asyncio.sleep(PREFILL_S * rng.uniform(0.9, 1.2))
            utterance = simulation.utterance(f"answer{next(numbers)}")
            speaking = asyncio.create_task(utterance.output.run())
            code2wav.num_thinking += 1
            code2wav.num_talking += 1
            block: list[int] = []
            for number in range(NUM_CODES):
                code2wav.num_thinking -= number == NUM_TEXT_TOKENS
                step_s = code2wav.thinker_s() if number < NUM_TEXT_TOKENS else code2wav.talker_s()
                await asyncio.sleep(step_s * rng.uniform(1.0, 1.04))
                block.append(number)
                if len(block) == LAYOUT.frames_per_block:
                    utterance.output.push([(code,) for code in block])
                    block = []
            code2wav.num_talking -= 1
            utterance.output.push([(code,) for code in block])
            utterance.output.finish()
            await speaking
            start = utterance.pieces[0][0]
            outcome.first_audio_s.append(start - asked_at)
            outcome.end_to_end_s.append(clock() - asked_at)
            outcome.underrun_s.append(max(0.0, utterance.stall_s))
            outcome.slack_s.append(
                [start + delta.first_sample / 24_000 - at for at, delta in utterance.pieces[1:]]
            )
            outcome.audio_s += NUM_CODES * CODE_SECONDS

        async def caller() -> None:
            for _ in range(answers):
                await answer()

        await asyncio.gather(*(caller() for _ in range(num_callers)))
        outcome.wall_s = clock()
        return outcome

    return run(work)
