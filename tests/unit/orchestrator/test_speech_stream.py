"""From codec tokens to sound: order, deadlines, limits, and what listeners hear."""

import asyncio
import random

import numpy as np
import pytest

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.errors import StageError
from omni_server.orchestrator.speech_scheduler import FIRST_WINDOW_DUE_S
from tests.unit.orchestrator.simulated_speech import (
    LAYOUT,
    SimulatedCode2Wav,
    Simulation,
    Utterance,
    is_whole,
)
from tests.unit.orchestrator.virtual_time import clock, in_virtual_time, run

FIRST_DUE = round(1000 * FIRST_WINDOW_DUE_S)
SECOND = 50
"""Codec tokens of one second."""
NO_DELAY = ChunkPlan(max_start_delay_s=0)


@in_virtual_time
async def test_the_whole_utterance_comes_out_in_order() -> None:
    rng = random.Random(0)
    for num_codes in (1, 12, 24, 25, 100, 411):
        simulation = Simulation(SimulatedCode2Wav(step_s=rng.random() / 10, code_s=0.001))
        utterance = await simulation.speak("u", num_codes, code_s=0.002)
        assert is_whole(utterance, num_codes)


@in_virtual_time
async def test_results_that_come_out_of_order_are_put_in_order() -> None:
    class Backwards(SimulatedCode2Wav):
        """Computes a window the sooner the later it is."""

        async def run(self, request_id, *args, **kwargs):  # type: ignore[no-untyped-def]
            await asyncio.sleep(1.0 / (1 + int(request_id.rpartition("-")[2])))
            self.computed.append(request_id)
            return await super().run(request_id, *args, **kwargs)

    code2wav = Backwards()
    utterance = await Simulation(code2wav, ChunkPlan(carry=False)).speak("u", 300)
    assert code2wav.computed[0] == "u-1"
    assert is_whole(utterance, 300)


@in_virtual_time
async def test_first_windows_are_due_a_second_later_and_later_ones_when_they_will_be_played() -> None:
    await asyncio.sleep(5.0)  # priorities count from the server's start, which is the simulation's
    simulation = Simulation(SimulatedCode2Wav(step_s=0.1))
    await asyncio.sleep(1.0)
    utterance = await simulation.speak("u", 280)
    assert utterance.first_audio_s == pytest.approx(0.1)
    # Blocks of 0.24 s, ramp 1 1 2 4 8: windows begin after 0, 1, 2, 4, 8 and 16 of them.
    left = 1100
    assert [call.priority for call in simulation.code2wav.calls] == [
        1000 + FIRST_DUE, left + 240, left + 480, left + 960, left + 1920, left + 3840,
    ]  # fmt: skip


@in_virtual_time
async def test_a_window_that_a_listener_needs_soon_is_computed_before_first_windows_that_came_earlier() -> (
    None
):
    code2wav = SimulatedCode2Wav(step_s=0.2, max_codes=40)  # one window in a step
    simulation = Simulation(code2wav, NO_DELAY)
    tasks = []
    for name in ("listener", "first", "second"):
        tasks.append(asyncio.create_task(simulation.speak(name, 36)))
        await asyncio.sleep(0.05)
    await asyncio.gather(*tasks)
    # The listener's second window, due 0.24 s after its first, came when the step of "first" had begun
    # and "second-0" waited.
    assert code2wav.computed[:3] == ["listener-0", "first-0", "listener-1"]
    assert "second-0" in code2wav.computed


@in_virtual_time
async def test_windows_of_a_caller_do_not_wait_for_all_overdue_ones_of_another() -> None:
    code2wav = SimulatedCode2Wav(step_s=0.3, max_codes=12)  # one window in a step
    simulation = Simulation(code2wav, NO_DELAY)

    async def start(name: str, caller: str) -> asyncio.Task[Utterance]:
        task = asyncio.create_task(simulation.speak(name, 12, caller=caller))
        await asyncio.sleep(0.01)
        return task

    tasks = [await start(f"busy{number}", "busy") for number in range(20)]
    await asyncio.sleep(2.0)  # seven have been computed, the eighth is; they were due after a second
    leaving = await start("leaving", "patient")
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    tasks += [await start(f"patient{number}", "patient") for number in range(2)]
    await asyncio.gather(*tasks)
    order = [name.removesuffix("-0") for name in code2wav.computed if not name.startswith("leaving")]
    assert order[8:12] == ["patient0", "busy8", "patient1", "busy9"]
    assert [name for name in order if name.startswith("busy")] == [f"busy{n}" for n in range(20)]
    assert simulation.scheduler.fairness.enter("new", 9.0, 99.0, not_before=0.0) == 9.0  # none is left


@in_virtual_time
async def test_windows_that_come_in_time_keep_their_deadlines_whoever_sends_them() -> None:
    code2wav = SimulatedCode2Wav(step_s=0.05, max_codes=12)
    simulation = Simulation(code2wav, NO_DELAY)
    tasks = []
    for number in range(12):  # the last waits for half a second
        caller = "patient" if number == 11 else "busy"
        tasks.append(asyncio.create_task(simulation.speak(str(number), 12, caller=caller)))
        await asyncio.sleep(0.001)
    await asyncio.gather(*tasks)
    assert code2wav.computed == [f"{number}-0" for number in range(12)]


@in_virtual_time
async def test_two_windows_of_a_stream_are_out_where_none_needs_the_state_of_another() -> None:
    for carry, limit in ((True, 1), (False, 2)):
        code2wav = SimulatedCode2Wav(step_s=0.1)
        plan = ChunkPlan(carry=carry)
        await Simulation(code2wav, plan).speak("u", 600)
        assert code2wav.most_running == {"u": limit}


@in_virtual_time
async def test_windows_that_carry_state_are_computed_one_after_the_other() -> None:
    """Many streams and a device that is busy: no step holds two windows of one stream, and none is
    overtaken."""
    code2wav = SimulatedCode2Wav(step_s=0.02, code_s=0.0005, max_codes=400)
    simulation = Simulation(code2wav)
    names = [f"u{n}" for n in range(12)]
    utterances = await asyncio.gather(*(simulation.speak(name, 400, code_s=0.005) for name in names))
    assert all(is_whole(utterance, 400) for utterance in utterances)
    assert code2wav.most_running == dict.fromkeys(names, 1)
    for name in names:
        own = [
            int(window.rpartition("-")[2]) for window in code2wav.computed if window.startswith(f"{name}-")
        ]
        assert own == list(range(len(own)))
    streams = {call.window_id.rpartition("-")[0]: call.stream for call in code2wav.calls}
    assert len(set(streams.values())) == len(names)
    assert all(call.stream == streams[call.window_id.rpartition("-")[0]] for call in code2wav.calls)
    assert None not in streams.values()


@in_virtual_time
async def test_a_stream_alone_is_computed_as_fast_as_the_device_can() -> None:
    code2wav = SimulatedCode2Wav(step_s=0.01)
    utterance = await Simulation(code2wav).speak("u", 60 * SECOND)
    assert utterance.pieces[-1][0] <= 0.01 * len(code2wav.calls) + 1e-6


@in_virtual_time
async def test_streams_are_computed_together_however_far_they_are_ahead_of_playback() -> None:
    code2wav = SimulatedCode2Wav(step_s=0.01)
    simulation = Simulation(code2wav)
    await asyncio.gather(*(simulation.speak(f"u{n}", 60 * SECOND) for n in range(8)))
    num_windows = len(code2wav.calls) / 8
    assert clock() <= 0.01 * (num_windows + 1) + 1e-6


@pytest.mark.parametrize("way", ["cancelled", "failed", "short"])
@in_virtual_time
async def test_an_end_of_any_kind_takes_the_windows_out_of_code2wav(way: str) -> None:
    code2wav = SimulatedCode2Wav(step_s=0.1, max_codes=132)
    simulation = Simulation(code2wav)
    others = [asyncio.create_task(simulation.speak(f"o{n}", 300)) for n in range(3)]
    utterance = simulation.utterance("u")
    speaking = asyncio.create_task(utterance.output.run())
    utterance.output.push([(code,) for code in range(300)])
    await asyncio.sleep(0.55)
    assert code2wav.num_running > 1
    if way == "cancelled":
        speaking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await speaking
    elif way == "failed":
        code2wav.errors = {f"u-{n}": StageError("code2wav", "broken") for n in range(6)}
        with pytest.raises(ExceptionGroup) as caught:
            await speaking
        assert caught.value.subgroup(StageError) is not None
    else:
        code2wav.num_missing = 1
        with pytest.raises(ExceptionGroup) as caught:
            await speaking
        [error] = caught.value.exceptions
        assert "samples where" in str(error)
        code2wav.num_missing = 0
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0)
    assert code2wav.num_running == 0


SLOW_STEP = {"step_s": 0.4, "code_s": 0.0}
"""Each window takes longer than a first one plays."""


async def known(simulation: Simulation) -> Simulation:
    """One utterance has shown how long a step takes."""
    await simulation.speak("before", 100)
    return simulation


@in_virtual_time
async def test_first_audio_waits_for_a_slow_device_and_later_windows_are_due_from_when_it_leaves() -> None:
    simulation = await known(Simulation(SimulatedCode2Wav(**SLOW_STEP)))
    num_before = len(simulation.code2wav.calls)
    utterance = await simulation.speak("u", 2000)
    # The third window comes 0.8 s after the first and begins 0.48 s behind it; of the others none needs
    # as much.
    assert utterance.first_audio_s == pytest.approx(0.4 + 0.8 - 0.48)
    assert utterance.stall_s <= 1e-6
    left_ms = round(utterance.pieces[0][0] * 1000)
    priorities = [call.priority for call in simulation.code2wav.calls[num_before:]]
    assert priorities[3:5] == [left_ms + 960, left_ms + 1920]


@in_virtual_time
async def test_first_audio_waits_for_a_slow_talker() -> None:
    for code_s in (0.005, 0.019, 0.030):
        utterance = await Simulation(SimulatedCode2Wav(step_s=0.01)).speak("u", 100, code_s=code_s)
        is_fast = code_s < 0.01
        assert (utterance.first_audio_s == pytest.approx(24 * code_s + 0.01)) is is_fast
        assert utterance.first_audio_s <= 100 * code_s + 0.011  # no longer than for all of it
        assert utterance.stall_s <= 1e-6


@in_virtual_time
async def test_a_complete_utterance_waits_no_longer() -> None:
    simulation = await known(Simulation(SimulatedCode2Wav(**SLOW_STEP)))
    utterance = await simulation.speak("u", 20)
    assert utterance.first_audio_s == pytest.approx(0.4)


@in_virtual_time
async def test_an_utterance_cancelled_while_its_first_audio_is_held_emits_nothing() -> None:
    simulation = await known(Simulation(SimulatedCode2Wav(**SLOW_STEP)))
    utterance = simulation.utterance("u")
    speaking = asyncio.create_task(utterance.output.run())
    utterance.output.push([(code,) for code in range(24)])
    await asyncio.sleep(0.5)
    speaking.cancel()
    await asyncio.wait([speaking])
    await asyncio.sleep(10.0)
    assert utterance.pieces == []


async def under_load(max_start_delay_s: float) -> tuple[list[Utterance], list[Utterance]]:
    """Eight callers at a time, each of whom calls again as soon as it has been answered; then one alone.

    The talker makes a code in 10 ms, a half of what it lasts. Alone, a window takes 50 ms. With eight, the
    second window comes too late: it waits for the step that runs, and that is a long one. The first call of
    each of the eight is left out, because nothing is known then.
    """
    plan = ChunkPlan(new_blocks=(1, 1, 2), max_start_delay_s=max_start_delay_s)
    simulation = Simulation(SimulatedCode2Wav(step_s=0.03, code_s=0.0012), plan)
    number = iter(range(1000))

    async def caller(num_calls: int, start_s: float) -> list[Utterance]:
        await asyncio.sleep(start_s)
        return [
            await simulation.speak(f"u{next(number)}", 4 * SECOND, code_s=0.010) for _ in range(num_calls)
        ]

    loaded = await asyncio.gather(*(caller(6, 0.037 * n) for n in range(8)))
    await asyncio.sleep(30.0)
    return [utterance for calls in loaded for utterance in calls[1:]], await caller(6, 0.0)


def test_under_load_players_stall_without_a_start_delay_and_hardly_with_one() -> None:
    without, _ = run(lambda: under_load(0.0))
    with_delay, _ = run(lambda: under_load(10.0))
    assert sum(u.stall_s > 0.02 for u in without) > len(without) / 2
    assert max(u.stall_s for u in with_delay) < 0.1


def test_the_start_delay_ends_with_the_load() -> None:
    _, alone = run(lambda: under_load(10.0))
    _, never = run(lambda: under_load(0.0))
    assert [u.first_audio_s for u in alone] == pytest.approx([u.first_audio_s for u in never])
    assert all(u.stall_s <= 1e-6 for u in alone)


@pytest.mark.parametrize("is_held", [False, True])
@in_virtual_time
async def test_a_stream_whose_text_pauses_is_heard_as_far_as_it_goes(*, is_held: bool) -> None:
    code2wav = SimulatedCode2Wav(step_s=0.01)
    simulation = Simulation(code2wav)
    utterance = simulation.utterance("u")
    utterance.output.may_pause, utterance.output.is_held = True, lambda: is_held
    speaking = asyncio.create_task(utterance.output.run())
    codes = list(range(200))
    for begin, end in ((0, 80), (80, 130)):  # the first window has a block of 12, the last one is context
        utterance.output.push([(code,) for code in codes[begin:end]])
        await asyncio.sleep(5.0)
        if is_held:
            heard = sum(delta.samples.size for _, delta in utterance.pieces)
            assert heard == (end // 12 - 1) * 12 * LAYOUT.samples_per_frame
    utterance.output.push([(code,) for code in codes[130:]])
    utterance.output.finish()
    await speaking
    assert is_whole(utterance, 200)
    unheld = Simulation(SimulatedCode2Wav())
    whole = await unheld.speak("u", 200)
    assert np.array_equal(
        *(np.concatenate([delta.samples for _, delta in spoken.pieces]) for spoken in (utterance, whole))
    )
