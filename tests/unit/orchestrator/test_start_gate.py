"""What a stream's start is held back for; whole streams under load are in test_speech_stream.py."""

import asyncio
from contextlib import ExitStack

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.orchestrator.start_gate import JITTER_S, LOOK_INTERVAL_S, TALKER_SLACK, Playback, StartGate
from omni_server.orchestrator.talker_pace import TalkerPace
from omni_server.orchestrator.window_schedule import WindowSchedule
from tests.unit.orchestrator.simulated_speech import LAYOUT
from tests.unit.orchestrator.virtual_time import clock, run

MAX_CODES = 1000
PLAN = ChunkPlan(new_blocks=(1, 2, 4))
SCHEDULE = WindowSchedule(PLAN, LAYOUT, PLAN.new_blocks)


class Listener:
    """A stream whose talker and code2wav the test plays."""

    def __init__(self, gate: StartGate, stack: ExitStack, *, has_schedule: bool = True) -> None:
        self.heard_at: list[float] = []
        self.playback = Playback(gate, lambda: self.heard_at.append(clock()))
        if has_schedule:
            self.playback.schedule = WindowSchedule(PLAN, LAYOUT, PLAN.new_blocks)
        stack.enter_context(gate.stream(self.playback))

    def window(self, num_codes: int) -> None:
        self.playback.sent()
        self.playback.came_back(num_codes)


def new_gate(max_delay_s: float = 2.0) -> StartGate:
    return StartGate(
        max_delay_s, clock, TalkerPace(LAYOUT.frames_per_block), max_step_codes=MAX_CODES, max_ahead_s=None
    )


async def pass_time(seconds: float) -> None:
    await asyncio.sleep(seconds)


def test_a_stream_is_heard_at_once_where_all_is_fast() -> None:
    async def work() -> None:
        with ExitStack() as stack:
            stream = Listener(new_gate(), stack)
            for _ in range(2):
                await pass_time(0.1)
                stream.playback.push(12)
            stream.window(24)
            await pass_time(0.001)
            assert stream.heard_at == [0.2]

    run(work)


def test_a_talker_slower_than_speech_holds_its_own_stream_and_no_other() -> None:
    async def work() -> None:
        with ExitStack() as stack:
            gate = new_gate()
            slow, fast = Listener(gate, stack), Listener(gate, stack)
            for _ in range(2):
                await pass_time(0.5)
                slow.playback.push(12)
            slow.window(24)
            fast.playback.push(12 * 16)
            fast.window(24)
            await pass_time(0.001)
            assert (slow.heard_at, fast.heard_at) == ([], [1.0])
            await pass_time(10.0)
            assert slow.heard_at == [3.0], "no longer than the limit"

    run(work)


def held(stack: ExitStack, gate: StartGate) -> Listener:
    """A stream of two windows, of which the first came back just now."""
    stream = Listener(gate, stack)
    stream.playback.push(36)
    stream.playback.finish()
    stream.window(24)
    return stream


def lockstep(stack: ExitStack, gate: StartGate, num_streams: int) -> list[Listener]:
    """As many that are held, with their second windows on their way."""
    streams = [held(stack, gate) for _ in range(num_streams)]
    for stream in streams:
        stream.playback.sent()
    return streams


async def gate_that_knows_steps(stack: ExitStack, *num_codes: int) -> StartGate:
    """Of so many codes each: 20 ms, and 0.3 ms for each code."""
    gate = new_gate()
    for step in num_codes:
        other = Listener(gate, stack, has_schedule=False)
        other.playback.sent()
        await pass_time(0.02 + 0.0003 * step)
        other.playback.came_back(step)
        await pass_time(0.01)
    return gate


def test_streams_whose_windows_are_in_one_step_do_not_wait_for_each_other() -> None:
    """Each is heard when the step's rest is short enough, though the step has not ended."""

    async def work() -> None:
        with ExitStack() as stack:
            gate = await gate_that_knows_steps(stack, 384, 600)
            streams = lockstep(stack, gate, 16)
            began = clock()
            await pass_time(0.18)  # of the 0.19 s that 576 codes take
            [heard_s] = {stream.heard_at[0] - began for stream in streams}
            # The rest of the step has to be shorter than 0.24 s of sound, of which some are kept for jitter.
            expected_s = gate.steps.predict(16 * 36) - (0.24 - JITTER_S)
            assert abs(heard_s - expected_s) <= LOOK_INTERVAL_S / 2 + 1e-6

    run(work)


async def until_those_of_the_step_are_heard(gate: StartGate, num_streams: int) -> None:
    """From the step's beginning on; those whose windows come in the step behind it are to be heard later."""
    step_s, one_more_s = gate.steps.predict(num_streams * 36), gate.steps.predict(36)
    assert one_more_s > 0.02
    await pass_time(step_s - (0.24 - JITTER_S) + one_more_s / 2)


def test_a_window_that_comes_when_a_step_has_begun_does_not_count_as_one_of_it() -> None:
    """It is computed in the next one, and its stream is held for longer than those of the step are."""

    async def work() -> None:
        with ExitStack() as stack:
            gate = await gate_that_knows_steps(stack, 384, 600)
            late = held(stack, gate)
            streams = lockstep(stack, gate, 14)
            await pass_time(0.005)
            late.playback.sent()
            await until_those_of_the_step_are_heard(gate, 14)
            assert late.heard_at == []
            assert {len(stream.heard_at) for stream in streams} == {1}
            await pass_time(0.1)
            assert len(late.heard_at) == 1

    run(work)


def test_streams_whose_windows_do_not_fit_into_one_step_wait_for_each_other() -> None:
    async def work() -> None:
        with ExitStack() as stack:
            gate = await gate_that_knows_steps(stack, 384, 600)
            streams = lockstep(stack, gate, 30)
            fitting = MAX_CODES // SCHEDULE.sent_codes(1)
            assert 12 < fitting < 24
            await pass_time(0.2)
            assert [len(stream.heard_at) for stream in streams] == [1] * fitting + [0] * (30 - fitting)
            await pass_time(0.04)
            for stream in streams[:fitting]:
                stream.playback.came_back(36)
            await pass_time(0.1)
            assert {len(stream.heard_at) for stream in streams} == {1}

    run(work)


def test_a_stream_alone_is_held_also_where_its_next_window_will_be_only_a_moment_late() -> None:
    """Two more blocks at the pace of those before, and a tenth more: 5 ms after the first one has been
    played."""

    async def work() -> None:
        block_s = (0.24 + 0.005) / (2 * TALKER_SLACK)
        with ExitStack() as stack:
            stream = Listener(new_gate(), stack)
            for _ in range(2):
                await pass_time(block_s)
                stream.playback.push(12)
            came_back_at = clock()
            stream.window(24)
            await pass_time(0.1)
            [heard_at] = stream.heard_at
            assert 0.005 <= heard_at - came_back_at <= LOOK_INTERVAL_S + 0.001

    run(work)


def test_no_stream_is_held_for_longer_than_the_limit_whenever_another_is_looked_at() -> None:
    async def work() -> None:
        with ExitStack() as stack:
            gate = new_gate(0.5)
            slow, other = Listener(gate, stack), Listener(gate, stack, has_schedule=False)
            for _ in range(2):
                await pass_time(0.5)
                slow.playback.push(12)
            slow.window(24)
            await pass_time(0.49)
            other.window(24)  # the gate looks
            await pass_time(1.0)
            assert slow.heard_at == [1.5]

    run(work)


def test_the_last_window_of_an_utterance_takes_also_what_it_would_have_waited_for() -> None:
    async def work() -> None:
        with ExitStack() as stack:
            playback = Listener(new_gate(), stack).playback
            playback.push(SCHEDULE.needed_codes(1) - 1)
            assert [playback.has_window(number) for number in range(4)] == [True] * 4
            playback.finish()
            assert SCHEDULE.first_code(2) < SCHEDULE.needed_codes(1) - 1
            assert [playback.has_window(number) for number in range(4)] == [True, True, False, False]
            playback.push(1)
            assert [playback.has_window(number) for number in range(4)] == [True, True, True, False]

    run(work)


def test_a_stream_that_ends_while_it_is_held_is_forgotten() -> None:
    async def work() -> None:
        gate = new_gate()
        with ExitStack() as stack:
            stream = Listener(gate, stack)
            for _ in range(2):
                await pass_time(0.5)
                stream.playback.push(12)
            stream.window(24)
            await pass_time(0.1)
        await pass_time(10.0)
        assert stream.heard_at == []

    run(work)


def test_nothing_is_held_with_no_delay_allowed_and_without_a_schedule() -> None:
    async def work() -> None:
        for gate, has_schedule in ((new_gate(0.0), True), (new_gate(), False)):
            with ExitStack() as stack:
                stream = Listener(gate, stack, has_schedule=has_schedule)
                began = clock()
                for _ in range(2):
                    await pass_time(0.5)
                    stream.playback.push(12)
                stream.window(24)
                await pass_time(0.001)
                assert stream.heard_at == [began + 1.0]

    run(work)


def test_a_talker_that_goes_on_faster_after_its_text_is_not_waited_for() -> None:
    """Each utterance's first four blocks come more slowly than speech, and the others at once. The first to
    be held shows the gate that it need not have been."""

    async def speak(gate: StartGate) -> float:
        with ExitStack() as stack:
            stream = Listener(gate, stack)
            began = clock()
            for block in range(4):
                await pass_time(0.3)
                stream.playback.push(12)
                if block == 1:
                    stream.window(24)
            await pass_time(0.05)
            stream.playback.push(12 * 16)
            await pass_time(10.0)
            return stream.heard_at[0] - began

    async def work() -> None:
        gate = new_gate()
        first, *_, last = [await speak(gate) for _ in range(30)]
        assert first > last + 0.3
        assert last >= 0.6

    run(work)


def test_all_whose_windows_come_back_together_are_heard_together_where_all_is_fast() -> None:
    async def work() -> None:
        with ExitStack() as stack:
            gate = new_gate()
            streams = [Listener(gate, stack) for _ in range(30)]
            await pass_time(0.1)
            for stream in streams:
                stream.playback.push(12 * 20)
                stream.playback.finish()
                stream.playback.sent()
            await pass_time(0.01)
            for stream in streams:
                stream.playback.came_back(24)
            await pass_time(0.2)
            assert len(streams) == sum(len(stream.heard_at) for stream in streams)

    run(work)


def test_many_that_wait_for_their_own_talkers_hold_no_other() -> None:
    async def work() -> None:
        with ExitStack() as stack:
            gate = new_gate()
            slow, fast = [Listener(gate, stack) for _ in range(12)], Listener(gate, stack)
            for _ in range(2):
                await pass_time(0.5)
                for stream in slow:
                    stream.playback.push(12)
            for stream in slow:
                stream.window(24)
            fast.playback.push(12 * 16)
            fast.window(24)
            await pass_time(0.001)
            assert [stream.heard_at for stream in slow] == [[]] * 12
            assert fast.heard_at == [1.0]

    run(work)


def test_a_talker_that_has_stopped_is_not_taken_for_one_that_is_done() -> None:
    """Its codes were so fast that the next window would have been in time; and then there are none."""

    async def work() -> None:
        with ExitStack() as stack:
            gate = new_gate()
            others = [Listener(gate, stack) for _ in range(12)]
            for stream in others:
                stream.playback.push(12 * 20)
            stalled = Listener(gate, stack)
            for _ in range(2):
                await pass_time(0.20)
                stalled.playback.push(12)
            stalled.window(24)
            await pass_time(0.001)
            assert stalled.heard_at == []
            for _ in range(8):
                await pass_time(0.15)
                others[0].window(24)  # each time the gate looks again
            assert stalled.heard_at == []
            await pass_time(5.0)
            assert stalled.heard_at == [2.4], "no longer than the limit"

    run(work)


def test_a_talker_whose_next_block_is_on_its_way_is_not_late() -> None:
    """Codes come by blocks; between two of them nothing is known to have gone wrong."""

    async def work() -> None:
        with ExitStack() as stack:
            stream = Listener(new_gate(), stack)
            for _ in range(4):
                await pass_time(0.24)
                stream.playback.push(12)
            expected = stream.playback.expected_codes_at(72)
            await pass_time(0.23)
            assert stream.playback.expected_codes_at(72) == expected
            await pass_time(0.24)
            assert 0.19 < stream.playback.expected_codes_at(72) - expected < 0.24

    run(work)


def test_a_held_stream_is_not_looked_at_all_the_time() -> None:
    """What it waits for stays as far away as it is, as long as no window comes back."""
    step_s = 0.15
    looks: set[float] = set()

    def watched() -> float:
        looks.add(clock())
        return clock()

    async def work() -> None:
        gate = StartGate(
            2.0, watched, TalkerPace(LAYOUT.frames_per_block), max_step_codes=MAX_CODES, max_ahead_s=None
        )
        with ExitStack() as stack:
            others = [Listener(gate, stack, has_schedule=False) for _ in range(8)]
            for _ in range(2):
                for other in others:
                    other.playback.sent()
                await pass_time(step_s)
                for other in others:
                    other.playback.came_back(24)
            for _ in range(8):
                Listener(gate, stack).playback.sent()
            held = Listener(gate, stack)
            held.playback.push(12 * 20)
            held.playback.finish()
            held.window(24)
            looks.clear()
            await pass_time(0.3)
            assert held.heard_at == []
            assert 5 < len(looks) <= 16

    run(work)
