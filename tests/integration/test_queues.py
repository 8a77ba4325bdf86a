"""Rows travel through shared memory, with backpressure, and nothing stays behind, whatever ends a request."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from omni_server.errors import DeadlineExceededError, StageDeadError, StageDownError
from omni_server.offline import collect
from omni_server.types import CodecDelta, SamplingConfig, TextDelta
from tests.integration.live import LiveOmni, demo_config, queue_files, spoken
from tests.integration.parity import Expected, expected, same_tokens
from tests.integration.server_process import wait_until
from tests.reference.cases import CASES
from tests.reference.reference import Reference

LONG_TEXT = SamplingConfig(temperature=0.0, max_tokens=2000, min_tokens=2000, ignore_eos=True)
LONG_SPEECH = SamplingConfig(temperature=0.0, max_tokens=2000, ignore_eos=True)


@pytest.fixture(scope="module")
def wanted(reference: Reference) -> list[Expected]:
    return [expected(reference, CASES[name]) for name in ("count", "image", "speech_ethan", "two_turns")]


@pytest.fixture(scope="module")
def narrow(checkpoint: Path) -> Iterator[LiveOmni]:
    """A queue of one slot, and prompts that need several steps."""
    config = demo_config(queue={"capacity": 1}, stages={"thinker": {"max_num_batched_tokens": 64}})
    live = LiveOmni(checkpoint, config)
    yield live
    live.close()


def test_rows_travel_through_shared_memory(narrow: LiveOmni, wanted: list[Expected]) -> None:
    before = narrow.row_slots().published
    same_tokens(narrow.answer(wanted[0].request), wanted[0])
    # One step for each token but the last, and at least one for the prompt.
    assert narrow.row_slots().published - before >= len(wanted[0].result.text_ids)


def test_a_queue_of_one_slot_still_finishes(narrow: LiveOmni, wanted: list[Expected]) -> None:
    for answer, want in zip(narrow.answers([w.request for w in wanted]), wanted, strict=True):
        same_tokens(answer, want)
    assert narrow.row_slots().in_use == 0


def test_an_abort_releases_the_request_in_every_stage(narrow: LiveOmni, wanted: list[Expected]) -> None:
    async def abort_after_sound() -> None:
        request = spoken(CASES["tell"].messages, thinker=LONG_TEXT, talker=LONG_SPEECH)
        async with aclosing(narrow.omni.events(request)) as events:
            async for event in events:
                if isinstance(event, CodecDelta):
                    break

    narrow.run(abort_after_sound())
    _is_idle(narrow)
    same_tokens(narrow.answer(wanted[0].request), wanted[0])


def test_an_abort_while_the_talker_is_held_back_releases_it(narrow: LiveOmni, wanted: list[Expected]) -> None:
    async def abort_early() -> None:
        request = spoken(CASES["video"].messages, thinker=LONG_TEXT)
        generation = await narrow.omni.submit(request, lambda _: None)
        await asyncio.sleep(0)
        await generation.aclose()

    narrow.run(abort_early())
    _is_idle(narrow)
    same_tokens(narrow.answer(wanted[1].request), wanted[1])


def test_many_aborts_among_running_requests_leave_those_alone(
    narrow: LiveOmni, wanted: list[Expected]
) -> None:
    async def storm() -> None:
        async def cut_off(number: int) -> None:
            request = spoken(CASES["tell"].messages, thinker=LONG_TEXT, talker=LONG_SPEECH)
            texts = 0
            async with aclosing(narrow.omni.events(request)) as events:
                async for event in events:
                    texts += isinstance(event, TextDelta)
                    if texts > number:
                        break

        answers, _ = await asyncio.gather(
            asyncio.gather(*(collect(narrow.omni, want.request) for want in wanted)),
            asyncio.gather(*(cut_off(number) for number in range(6))),
        )
        for answer, want in zip(answers, wanted, strict=True):
            same_tokens(answer, want)

    narrow.run(storm())
    _is_idle(narrow)


def test_a_deadline_ends_the_request_everywhere_and_tells_the_caller(
    narrow: LiveOmni, wanted: list[Expected]
) -> None:
    request = spoken(CASES["tell"].messages, thinker=LONG_TEXT, talker=LONG_SPEECH, deadline_s=0.5)
    with pytest.raises(DeadlineExceededError):
        narrow.answer(request)
    _is_idle(narrow)
    same_tokens(narrow.answer(wanted[0].request), wanted[0])


def test_a_killed_engine_fails_requests_and_leaves_nothing_behind(checkpoint: Path) -> None:
    """Where stages are not started again."""
    files = queue_files()
    live = LiveOmni(checkpoint, demo_config(supervision={"max_restarts": 0}))
    try:
        assert queue_files() - files

        async def speak_and_be_killed() -> None:
            request = spoken(CASES["tell"].messages, thinker=LONG_TEXT, talker=LONG_SPEECH)
            pid = live.omni.engine_pids()["talker"]
            is_killed = False
            async for event in live.omni.events(request):
                if isinstance(event, CodecDelta) and not is_killed:
                    os.kill(pid, signal.SIGKILL)
                    is_killed = True

        async def kill_while_speaking() -> None:
            with pytest.raises(StageDeadError, match="talker"):
                await speak_and_be_killed()
            with pytest.raises(StageDownError, match="talker"):
                await asyncio.wait_for(collect(live.omni, spoken(CASES["count"].messages)), 60)

        live.run(kill_while_speaking())
        wait_until(lambda: not live.omni.is_alive(), 60)
        assert not live.omni.is_ready()
    finally:
        live.close()
    assert queue_files() == files


def _is_idle(live: LiveOmni) -> None:
    """An abort is a message to the engine: what it releases is gone once a later request has been
    answered."""
    live.answer(spoken(CASES["two_tokens"].messages))
    assert live.omni.num_running == 0
    assert live.held_rows() == 0
    assert live.row_slots().in_use == 0
