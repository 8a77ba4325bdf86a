"""By which ramp an utterance is cut."""

import asyncio
from contextlib import ExitStack

from omni_server.config.chunk_plan import BusyChunks, ChunkPlan, PacingConfig
from tests.unit.orchestrator.simulated_speech import LAYOUT, SimulatedCode2Wav, Simulation, is_whole
from tests.unit.orchestrator.virtual_time import run

PLAN = ChunkPlan(
    new_blocks=(1, 2),
    busy=(BusyChunks(min_streams=3, new_blocks=(4,)), BusyChunks(min_streams=5, new_blocks=(6,))),
)
NUM_CODES = 12 * LAYOUT.frames_per_block


async def cut_among(num_streams: int, plan: ChunkPlan = PLAN) -> list[int]:
    """Codec tokens of the windows of one utterance, with so many under way."""
    code2wav = SimulatedCode2Wav()
    simulation = Simulation(code2wav, plan=plan)
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
        (end - start) // (LAYOUT.samples_per_frame * LAYOUT.frames_per_block)
        for start, end in zip(starts, ends, strict=True)
    ]


def test_utterances_that_begin_among_others_are_cut_as_the_plan_says_for_so_many() -> None:
    assert run(lambda: cut_among(2)) == [1, 2, 2, 2, 2, 2, 1]
    assert run(lambda: cut_among(3)) == [4, 4, 4]
    assert run(lambda: cut_among(4)) == [4, 4, 4]
    assert run(lambda: cut_among(5)) == run(lambda: cut_among(9)) == [6, 6]


def test_who_is_far_ahead_and_waits_does_not_count_among_many() -> None:
    async def work() -> None:
        plan = PLAN.model_copy(update={"pacing": PacingConfig(max_work_ahead_s=1.0)})
        simulation = Simulation(SimulatedCode2Wav(step_s=0.1), plan.pacing, plan)
        names = [f"long{number}" for number in range(4)]
        tasks = [asyncio.create_task(simulation.speak(name, 100 * NUM_CODES)) for name in names]
        await asyncio.sleep(0.05)
        assert simulation.pacer.num_streams == 4
        await asyncio.sleep(20.0)
        assert simulation.pacer.start_gate.num_streams == 4
        assert simulation.pacer.num_streams == 2  # who fill up code2wav's next steps
        simulation.code2wav.calls.clear()
        await simulation.speak("new", 24, code_s=0.001)
        told = [call.num_streams for call in simulation.code2wav.calls if call.window_id.startswith("new-")]
        assert told
        assert set(told) <= {2, 3}
        for task in tasks:
            task.cancel()

    run(work)


def test_without_windows_for_busy_times_all_are_cut_alike() -> None:
    plan = ChunkPlan(new_blocks=(1, 2))
    assert run(lambda: cut_among(3, plan)) == run(lambda: cut_among(1, plan)) == [1, 2, 2, 2, 2, 2, 1]


def test_in_one_pass_there_is_nothing_to_cut() -> None:
    plan = ChunkPlan(mode="whole", busy=(BusyChunks(min_streams=2, new_blocks=(4,)),))
    assert run(lambda: cut_among(3, plan)) == [12]


def test_an_utterance_that_has_been_cut_keeps_its_ramp_when_others_come() -> None:
    async def work() -> None:
        simulation = Simulation(SimulatedCode2Wav(), plan=PLAN)
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
        assert [call.window_id for call in simulation.code2wav.calls] == [
            f"first-{number}" for number in range(7)
        ]
        for task in tasks[1:]:
            task.cancel()

    run(work)
