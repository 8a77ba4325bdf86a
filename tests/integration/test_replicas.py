"""Two replicas of each stage, on real engines: the same answers, the death of one, its replacement,
aborts."""

import asyncio
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from omni_server.errors import ReplacementError, StageDeadError
from omni_server.offline import OmniOutput, collect
from omni_server.types import AudioDelta, CodecDelta, OmniRequest, SamplingConfig
from tests.integration.live import LiveOmni, demo_config, queue_files, spoken
from tests.integration.parity import STEP_OF_16_BITS, Expected, expected, same_tokens
from tests.reference.cases import CASES
from tests.reference.reference import Reference

STAGES = ("thinker", "talker", "code2wav")
REPLICAS = [f"{stage}/{number}" for stage in STAGES for number in range(2)]
RECOVERY_TIMEOUT_S = 60.0

LONG_TEXT = SamplingConfig(temperature=0.0, max_tokens=40, ignore_eos=True)
LONG_SPEECH = SamplingConfig(temperature=0.0, min_tokens=200, max_tokens=200, ignore_eos=True)
ENDLESS_SPEECH = SamplingConfig(temperature=0.0, max_tokens=9000, ignore_eos=True)
Sound = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def live(checkpoint: Path) -> Iterator[LiveOmni]:
    files = queue_files()
    live = LiveOmni(checkpoint, demo_config(stages={stage: {"replicas": 2} for stage in STAGES}))
    assert len(queue_files() - files) == 2, "a queue for each thinker"
    yield live
    live.close()
    assert queue_files() == files


@pytest.fixture(scope="module")
def wanted(reference: Reference) -> list[Expected]:
    return [expected(reference, CASES[name]) for name in ("count", "image", "speech_ethan", "two_turns")]


def again(want: Expected) -> OmniRequest:
    """The same request under another id."""
    return replace(want.request, request_id=f"again-{random.getrandbits(64):x}")


def long_speech() -> OmniRequest:
    return spoken(CASES["tell"].messages, thinker=LONG_TEXT, talker=LONG_SPEECH)


def loads(live: LiveOmni) -> dict[str, int]:
    """The requests of each replica."""
    return {one.name: one.num_requests for one in live.omni.replicas()}


def is_idle(live: LiveOmni) -> None:
    """An abort is a message to the engine: what it releases is gone once a later request has been answered by
    it."""
    live.answers([spoken(CASES["two_tokens"].messages) for _ in range(4)])
    assert live.omni.num_running == 0
    assert loads(live) == dict.fromkeys(REPLICAS, 0)
    assert live.held_rows() == 0
    assert [slots.in_use for slots in live.omni.row_slots().values()] == [0, 0]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(RECOVERY_TIMEOUT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_all_replicas_answer_as_the_reference_does(live: LiveOmni, wanted: list[Expected]) -> None:
    before = {edge: slots.published for edge, slots in live.omni.row_slots().items()}
    twice = [want for want in wanted for _ in range(2)]
    for answer, want in zip(live.answers([again(want) for want in twice]), twice, strict=True):
        same_tokens(answer, want)
    now = {edge: slots.published for edge, slots in live.omni.row_slots().items()}
    assert all(now[edge] > before[edge] for edge in now), "both thinkers have sent rows"
    is_idle(live)


def test_a_killed_replica_fails_its_own_requests_and_comes_back(
    live: LiveOmni, wanted: list[Expected]
) -> None:
    killed = "talker/1"
    may_leave = asyncio.Event()

    async def two_seconds() -> tuple[tuple[int, ...], Sound]:
        """Of an answer without an end, which goes on for as long as it may not leave."""
        codes, pieces = tuple[int, ...](), list[Sound]()
        request = spoken(CASES["tell"].messages, thinker=LONG_TEXT, talker=ENDLESS_SPEECH)
        async with aclosing(live.omni.events(request)) as events:
            async for event in events:
                if isinstance(event, CodecDelta):
                    codes += event.codes
                elif isinstance(event, AudioDelta):
                    pieces.append(event.samples)
                if sum(map(len, pieces)) >= 48_000 and may_leave.is_set():
                    break
        return codes[:100], np.concatenate(pieces)[:48_000]

    async def kill_in_mid_stream() -> tuple[list[tuple[tuple[int, ...], Sound] | BaseException], OmniOutput]:
        pid = live.omni.engine_pids()[killed]
        may_leave.clear()
        speaking = [asyncio.create_task(two_seconds()) for _ in range(4)]
        # Until all have codes.
        await until(lambda: loads(live)["code2wav/0"] == loads(live)["code2wav/1"] == 2)
        os.kill(pid, signal.SIGKILL)
        # One of its requests may have two seconds already, and would leave before it learns of the kill.
        await until(lambda: sum(task.done() for task in speaking) == 2)
        may_leave.set()
        answers = await asyncio.gather(*speaking, return_exceptions=True)
        at_once = await collect(live.omni, again(wanted[0]))
        await until(lambda: live.omni.engine_pids().get(killed, pid) != pid)
        return answers, at_once

    may_leave.set()
    alone = live.run(two_seconds())
    answers, at_once = live.run(kill_in_mid_stream())
    failed = [answer for answer in answers if isinstance(answer, StageDeadError)]
    others = [answer for answer in answers if isinstance(answer, tuple)]
    assert (len(failed), len(others)) == (2, 2)
    assert {error.message for error in failed} == {
        f"stage '{killed}': its engine process was killed (SIGKILL)"
    }
    for codes, sound in others:
        assert codes == alone[0]
        assert np.abs(sound - alone[1]).max() <= STEP_OF_16_BITS
    same_tokens(at_once, wanted[0])
    for answer, want in zip(live.answers([again(want) for want in wanted]), wanted, strict=True):
        same_tokens(answer, want)
    is_idle(live)


def test_all_replicas_are_replaced_one_after_the_other_under_load_without_an_error(
    live: LiveOmni, wanted: list[Expected]
) -> None:
    async def replace_all() -> None:
        is_over, num_answers = False, 0

        async def caller(number: int) -> None:
            nonlocal num_answers
            while not is_over:
                want = wanted[number]
                same_tokens(await collect(live.omni, again(want)), want)
                num_answers += 1

        async with asyncio.TaskGroup() as group:
            for number in range(2):
                group.create_task(caller(number))
            before = live.omni.engine_pids()
            for name in ("thinker/0", "talker/1", "code2wav/0"):
                pid = await live.omni.replace(name)
                assert live.omni.engine_pids() == before | {name: pid}
                before[name] = pid
            await until(lambda: num_answers > 3)
            is_over = True

    live.run(replace_all())
    is_idle(live)


def test_a_replica_whose_requests_take_too_long_is_not_replaced(live: LiveOmni) -> None:
    async def replace_busy() -> OmniOutput:
        pids = live.omni.engine_pids()
        async with live.stopped("talker/0", until={}):
            speaking = [asyncio.create_task(collect(live.omni, long_speech())) for _ in range(2)]
            await until(lambda: loads(live)["talker/0"] == 1)
            with pytest.raises(ReplacementError, match="'talker/0' still has 1 requests"):
                await live.omni.replace("talker/0", timeout_s=0.1)
        assert live.omni.engine_pids() == pids
        return (await asyncio.gather(*speaking))[0]

    assert len(live.run(replace_busy()).codes) == 200


def test_nothing_is_held_after_many_aborts(live: LiveOmni, wanted: list[Expected]) -> None:
    async def storm() -> None:
        async def cut_off(number: int) -> None:
            num_events = 0
            async with aclosing(live.omni.events(long_speech())) as events:
                async for _ in events:
                    num_events += 1
                    if num_events > number:
                        break

        async def keep_answering() -> None:
            for want in wanted[:2]:
                same_tokens(await collect(live.omni, again(want)), want)

        await asyncio.gather(keep_answering(), *(cut_off(number) for number in range(0, 40, 2)))

    live.run(storm())
    is_idle(live)
