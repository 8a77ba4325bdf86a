"""When windows are due, and when playback begins; whole streams under load are in
test_speech_stream.py."""

import asyncio
from contextlib import ExitStack
from itertools import count

import pytest

from omni_server.config.chunk_plan import BusyChunks, ChunkPlan, output_ends
from omni_server.orchestrator.speech_scheduler import (
    MIN_RECHECK_S,
    PendingStreams,
    PlayoutClock,
    SpeechScheduler,
    WindowRamp,
)
from omni_server.types import SAMPLE_RATE_HZ
from stages.qwen2_5_omni.options import Code2WavChunks
from stages.qwen2_5_omni.talker_to_code2wav import TalkerToCode2Wav
from tests.unit.orchestrator.simulated_speech import (
    LAYOUT,
    SimulatedCode2Wav,
    Simulation,
    Utterance,
    is_whole,
)
from tests.unit.orchestrator.virtual_time import clock, in_virtual_time, run

BLOCK = LAYOUT.frames_per_block

# -- the windows of a stream


@pytest.mark.parametrize("ramp", [(1,), (1, 2, 4), (2, 1, 3)])
@pytest.mark.parametrize("other", [None, (3, 2)])
@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("past_blocks", [1, 3])
def test_a_ramp_says_what_the_edge_does(
    ramp: tuple[int, ...], other: tuple[int, ...] | None, past_blocks: int, *, carry: bool
) -> None:
    plan = Code2WavChunks(new_blocks=ramp, past_blocks=past_blocks, future_blocks=2, carry=carry)
    windows = WindowRamp(plan, LAYOUT, used := ramp if other is None else other)
    edge = TalkerToCode2Wav(plan, LAYOUT, voice="Ethan", noise_seed=0)
    edge.use_ramp(used)
    number = 0
    if other is None:
        ends = output_ends(plan.blocks_per_output(may_pause=False))
        assert all(next(ends) * BLOCK == windows.needed_frames(window) for window in range(20))
    for made in range(1, 400):
        for window in edge.push([(0,)]):
            assert made == windows.needed_frames(number)
            assert window.first_sample == round(windows.start_s(number) * SAMPLE_RATE_HZ)
            assert window.first_sample == windows.first_frame(number) * LAYOUT.samples_per_frame
            assert window.num_computed == windows.computed_frames(number)
            number += 1
    assert number > 5
    *_, last = edge.finish()
    assert last.num_computed <= windows.computed_frames(number)


PLAN = ChunkPlan(
    new_blocks=(1, 2),
    busy=(BusyChunks(min_streams=3, new_blocks=(4,)), BusyChunks(min_streams=5, new_blocks=(6,))),
)
NUM_CODES = 12 * BLOCK


async def cut_among(num_streams: int, plan: ChunkPlan = PLAN) -> list[int]:
    """New blocks of each window of one stream, with so many active."""
    simulation = Simulation(SimulatedCode2Wav(), plan)
    with ExitStack() as stack:
        for number in range(num_streams - 1):
            other = simulation.utterance(f"other{number}")
            task = asyncio.create_task(other.output.run())
            stack.callback(task.cancel)
        await asyncio.sleep(0)
        utterance = await simulation.speak("own", NUM_CODES, code_s=0.001)
        assert is_whole(utterance, NUM_CODES)
    starts = [delta.first_sample for _, delta in utterance.pieces]
    ends = [*starts[1:], NUM_CODES * LAYOUT.samples_per_frame]
    return [
        (end - start) // (LAYOUT.samples_per_frame * BLOCK) for start, end in zip(starts, ends, strict=True)
    ]


def test_streams_that_begin_among_others_are_cut_as_the_plan_says_for_so_many() -> None:
    assert run(lambda: cut_among(2)) == [1, 2, 2, 2, 2, 2, 1]
    assert run(lambda: cut_among(3)) == [4, 4, 4]
    assert run(lambda: cut_among(4)) == [4, 4, 4]
    assert run(lambda: cut_among(5)) == run(lambda: cut_among(9)) == [6, 6]


def test_without_windows_for_busy_times_all_are_cut_alike() -> None:
    plan = ChunkPlan(new_blocks=(1, 2))
    assert run(lambda: cut_among(3, plan)) == run(lambda: cut_among(1, plan)) == [1, 2, 2, 2, 2, 2, 1]


def test_streams_without_a_frame_count_in_equal_parts_for_each_decoder() -> None:
    pending = PendingStreams(num_decoders=2)
    first, second = (SpeechScheduler(PLAYED, LAYOUT, pending, clock=float) for _ in range(2))
    with ExitStack() as streams:
        for _ in range(5):
            streams.enter_context(pending.stream())
        assert (first.num_streams, second.num_streams) == (3, 3)
        streams.enter_context(first.stream(PlayoutClock(first, lambda: None, "caller")))
        assert (first.num_streams, second.num_streams) == (4, 3)
    assert (first.num_streams, second.num_streams) == (0, 0)


@in_virtual_time
async def test_a_stream_that_has_been_cut_keeps_its_ramp_when_others_come() -> None:
    simulation = Simulation(SimulatedCode2Wav(), PLAN)
    first = simulation.utterance("first")
    tasks = [asyncio.create_task(first.output.run())]
    first.output.push([(code,) for code in range(24)])
    for number in range(4):
        other = simulation.utterance(f"other{number}")
        tasks.append(asyncio.create_task(other.output.run()))
    await asyncio.sleep(0)
    first.output.push([(code,) for code in range(24, NUM_CODES)])
    first.output.finish()
    await tasks[0]
    assert is_whole(first, NUM_CODES)
    assert [call.window_id for call in simulation.code2wav.calls] == [f"first-{n}" for n in range(7)]
    for task in tasks[1:]:
        task.cancel()


# -- when playback begins

PLAYED = ChunkPlan(new_blocks=(1, 2, 4))


class Listener:
    """A stream whose talker and code2wav the test plays."""

    def __init__(
        self,
        scheduler: SpeechScheduler,
        stack: ExitStack,
        *,
        has_ramp: bool = True,
        plan: ChunkPlan = PLAYED,
        may_pause: bool = False,
    ) -> None:
        self.heard_at: list[float] = []
        self._num_sent = 0
        self.buffer = PlayoutClock(
            scheduler, lambda: self.heard_at.append(clock()), "caller", may_pause=may_pause
        )
        if has_ramp:
            self.buffer.ramp = WindowRamp(plan, LAYOUT, plan.new_blocks)
        stack.enter_context(scheduler.stream(self.buffer))

    def send_window(self) -> None:
        ramp = self.buffer.ramp
        self.buffer.window_sent(0.0 if ramp is None else ramp.start_s(self._num_sent))
        self._num_sent += 1

    def window(self, num_codes: int = 24) -> None:
        self.send_window()
        self.buffer.window_completed(num_codes)

    async def talk(self, *block_s: float) -> None:
        for seconds in block_s:
            await asyncio.sleep(seconds)
            self.buffer.push(BLOCK)


def new_scheduler(max_start_delay_s: float = 2.0) -> SpeechScheduler:
    plan = PLAYED.model_copy(update={"max_start_delay_s": max_start_delay_s})
    return SpeechScheduler(plan, LAYOUT, PendingStreams(), clock=clock)


@in_virtual_time
async def test_what_a_warm_up_took_holds_no_stream() -> None:
    with ExitStack() as stack:
        scheduler = new_scheduler()
        first, stream = Listener(scheduler, stack), Listener(scheduler, stack)
        await first.talk(3.0, 3.0)
        first.send_window()
        await asyncio.sleep(0.9)
        first.buffer.window_completed(24)
        first.buffer.finish()
        scheduler.reset()
        await stream.talk(0.1, 0.1)
        came_back_at = clock()
        stream.window()
        await asyncio.sleep(0.001)
        assert stream.heard_at == [came_back_at]


@in_virtual_time
async def test_a_talker_slower_than_speech_holds_its_own_stream_and_no_other() -> None:
    with ExitStack() as stack:
        scheduler = new_scheduler()
        slow, fast = Listener(scheduler, stack), Listener(scheduler, stack)
        await slow.talk(0.5, 0.5)
        slow.window()
        fast.buffer.push(BLOCK * 16)
        fast.window()
        await asyncio.sleep(0.001)
        assert (slow.heard_at, fast.heard_at) == ([], [1.0])
        await asyncio.sleep(10.0)
        assert slow.heard_at == [3.0], "no longer than the limit"


@in_virtual_time
async def test_a_stream_is_not_held_for_frames_that_its_talker_sends_with_the_next_window() -> None:
    """Blocks of 0.24 s take 0.1 s, windows 0.3 s. The second window is back 0.4 s after the first one,
    which has 0.48 s of audio. It would be late if a frame of it were overdue."""
    plan = ChunkPlan(new_blocks=(2, 4), future_blocks=0)
    scheduler = SpeechScheduler(plan, LAYOUT, PendingStreams(), clock=clock)
    for _ in range(2):
        with ExitStack() as stack:
            stream = Listener(scheduler, stack, plan=plan)
            stream.buffer.push(BLOCK * 2)
            stream.send_window()
            await asyncio.sleep(0.3)
            came_back_at = clock()
            stream.buffer.window_completed(24)
            await asyncio.sleep(0.1)
            stream.buffer.push(BLOCK * 4)
            stream.send_window()
            await asyncio.sleep(0.3)
            stream.buffer.window_completed(48)
            stream.buffer.finish()
    assert stream.heard_at == [came_back_at]


@pytest.mark.parametrize("may_pause", [False, True])
@in_virtual_time
async def test_the_pause_of_a_text_that_is_being_written_holds_no_other_stream(*, may_pause: bool) -> None:
    with ExitStack() as stack:
        scheduler = new_scheduler()
        paused, other = (Listener(scheduler, stack, may_pause=is_first) for is_first in (may_pause, False))
        await paused.talk(0.01, 0.01, 5.0)
        other.buffer.push(BLOCK * 2)
        other.window()
        await asyncio.sleep(1.0)
        assert bool(other.heard_at) is may_pause


@in_virtual_time
async def test_all_whose_windows_come_back_together_are_heard_together_where_all_is_fast() -> None:
    with ExitStack() as stack:
        scheduler = new_scheduler()
        streams = [Listener(scheduler, stack) for _ in range(30)]
        await asyncio.sleep(0.1)
        for stream in streams:
            stream.buffer.push(BLOCK * 20)
            stream.buffer.finish()
            stream.send_window()
        await asyncio.sleep(0.01)
        for stream in streams:
            stream.buffer.window_completed(24)
        await asyncio.sleep(0.2)
        assert len(streams) == sum(len(stream.heard_at) for stream in streams)


@in_virtual_time
async def test_a_talker_that_goes_on_faster_after_its_text_is_not_waited_for() -> None:
    """Each stream's first four blocks come more slowly than speech, and the others at once. The first to be
    held shows that it need not have been."""

    async def speak(scheduler: SpeechScheduler) -> float:
        with ExitStack() as stack:
            stream = Listener(scheduler, stack)
            began = clock()
            for block in range(4):
                await stream.talk(0.3)
                if block == 1:
                    stream.window()
            await asyncio.sleep(0.05)
            stream.buffer.push(BLOCK * 16)
            await asyncio.sleep(10.0)
            return stream.heard_at[0] - began

    scheduler = new_scheduler()
    *_, last = [await speak(scheduler) for _ in range(30)]
    # The second window has its codes after 1.2 s and is played 0.24 s behind the first.
    assert last == pytest.approx(1.2 - 0.24, abs=MIN_RECHECK_S + 0.001)


@in_virtual_time
async def test_a_talker_that_has_stopped_is_not_taken_for_one_that_is_done() -> None:
    """It would have been heard after 0.96 s, had there been more codes by then."""
    with ExitStack() as stack:
        scheduler = new_scheduler()
        stalled = Listener(scheduler, stack)
        await stalled.talk(0.30, 0.30)
        stalled.window()
        await asyncio.sleep(0.1)
        assert stalled.heard_at == []
        await asyncio.sleep(5.0)
        assert stalled.heard_at == [pytest.approx(2.6)], "no longer than the limit"


REAL_TIME_FACTOR = 0.7
"""Seconds of speech that a second of production yields."""


async def speak_beside_full_load(simulation: Simulation, *num_codes: int) -> list[Utterance]:
    """Streams one after the other, at 0.7 of real time, beside three that speak all the time."""

    async def others(number: int) -> None:
        for answer in count():
            await simulation.speak(f"other{number}-{answer}", 250, code_s=0.020 / REAL_TIME_FACTOR)

    load = [asyncio.create_task(others(number)) for number in range(3)]
    utterances = [
        await simulation.speak(f"stream{number}", codes, code_s=0.020 / REAL_TIME_FACTOR)
        for number, codes in enumerate(num_codes)
    ]
    for task in load:
        task.cancel()
    return utterances


@pytest.mark.parametrize("has_history", [False, True])
@in_virtual_time
async def test_beside_full_load_a_stream_slower_than_real_time_waits_for_what_is_missing_and_has_no_gap(
    *, has_history: bool
) -> None:
    simulation = Simulation(SimulatedCode2Wav(step_s=0.05, code_s=0.001))
    *_, utterance = await speak_beside_full_load(simulation, *[250] * (5 if has_history else 1))
    assert utterance.stall_s <= 1e-6
    missing_s = 5.0 / REAL_TIME_FACTOR - 5.0
    # The last window waits for the codes of nine blocks.
    last_window_s = 9 * BLOCK * 0.020 / REAL_TIME_FACTOR
    assert missing_s < utterance.first_audio_s <= missing_s + last_window_s + 0.5


@in_virtual_time
async def test_a_stream_slower_than_real_time_waits_for_ten_seconds_at_most() -> None:
    """Streams of 40 s would lack 17 s."""
    simulation = Simulation(SimulatedCode2Wav(step_s=0.05, code_s=0.001))
    *_, utterance = await speak_beside_full_load(simulation, 2000, 2000)
    first_window_s = 2 * BLOCK * 0.020 / REAL_TIME_FACTOR
    assert 10.0 < utterance.first_audio_s < 10.0 + first_window_s + 0.5
    assert utterance.stall_s > 0


@in_virtual_time
async def test_playback_has_no_gap_where_load_comes_from_one_stream_to_the_next() -> None:
    """As on a CPU: speech takes 0.45 of its length to make, and with other work on all cores 1.2 of it."""
    code2wav = SimulatedCode2Wav(step_s=0.02, code_s=0.0015)
    simulation = Simulation(code2wav)
    for number in range(3):
        idle = await simulation.speak(f"idle{number}", 300, code_s=0.009)
        assert idle.first_audio_s < 0.3
    code2wav.slow_down(3)
    for number in range(3):
        loaded = await simulation.speak(f"loaded{number}", 300, code_s=0.024)
        assert loaded.stall_s <= 1e-6


@in_virtual_time
async def test_after_a_load_a_lone_stream_begins_as_early_as_before_it() -> None:
    simulation = Simulation(SimulatedCode2Wav(step_s=0.02, code_s=0.0005))
    for number in range(4):
        before = await simulation.speak(f"before{number}", 250, code_s=0.003)
    for answer in range(3):
        await asyncio.gather(
            *(simulation.speak(f"load{number}-{answer}", 250, code_s=0.01) for number in range(32))
        )
    after = await simulation.speak("after", 250, code_s=0.003)
    assert after.first_audio_s <= before.first_audio_s + MIN_RECHECK_S
    assert after.stall_s <= 1e-6
