"""An abort storm, an overload, and a short form of scripts/soak, on one server."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.supervised_server import SupervisedServer, write_config
from tests.load.answers import Answer
from tests.load.asks import endless_ask, mixed_asks, reading_asks, spoken_asks
from tests.load.census import Census, leaks
from tests.load.mixed_load import alone
from tests.load.overload import capacity, first_answer_s, overload
from tests.load.soak import SoakPlan, port_of, soak, warm_up
from tests.load.storm import storm
from tests.load.wire import Ask, exchange
from tests.omni_families import QWEN3_OMNI, QWEN3_TTS, OmniFamily, for_families

MAX_QUEUE = 24
CONCURRENCY = 10
NUM_QUESTIONS = 1
"""Of those in the mix: every kind of request with each."""
LONGEST = 120
"""Frames: 10 s of speech."""
DEADLINE_S = 120
"""No answer takes so long, on a busy machine either: one that does was forgotten."""


@dataclass(frozen=True)
class Loaded:
    server: SupervisedServer
    wanted: dict[Ask, Answer]
    before: Census


@pytest.fixture(scope="module")
def loaded(
    family: OmniFamily, checkpoints: dict[OmniFamily, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Loaded]:
    folder = tmp_path_factory.mktemp("loaded")
    config = write_config(folder / "stages.yaml", failing=False, num_clients=MAX_QUEUE, family=family)
    flags = ["--max-queue", str(MAX_QUEUE), "--request-timeout", str(DEADLINE_S)]
    flags += ["--stage-config", str(config)]
    asks = mixed_asks(NUM_QUESTIONS, LONGEST) if family.chats else reading_asks()
    log = folder / "log.txt"
    with SupervisedServer(checkpoints[family], log, *flags, has_queue=family.chats) as server:
        yield Loaded(server, *asyncio.run(warm_up(server, asks, CONCURRENCY)))


@for_families(QWEN3_OMNI, QWEN3_TTS)
async def test_abort_storm_changes_no_answer_of_the_others_and_leaves_nothing_behind(loaded: Loaded) -> None:
    result = await storm(
        loaded.server, loaded.wanted, loaded.before, number=40, concurrency=CONCURRENCY, seed=2
    )
    tally = result.tally
    assert tally.is_clean, tally.wrong + tally.lost + tally.duplicated
    assert tally.sent == tally.accounted == tally.exact + tally.aborted >= 40
    assert tally.aborted > 8
    assert tally.exact > 8
    assert not result.leaked
    assert not result.changed


@for_families(QWEN3_OMNI)
async def test_short_replies_are_given_while_long_ones_go_on(loaded: Loaded) -> None:
    port = port_of(loaded.server)
    async with asyncio.TaskGroup() as group:
        long = [
            group.create_task(exchange(port, endless_ask(), f"long-{number}", 300)) for number in range(6)
        ]
        short = await alone(port, [ask for ask in loaded.wanted if not ask.kind.startswith("long")][:5])
        assert not any(task.done() for task in long)
        for task in long:
            task.cancel()
    assert not [
        ask.kind for ask, answer in short.items() if answer.difference(loaded.wanted[ask]) is not None
    ]


@for_families(QWEN3_OMNI)
async def test_mixed_load_with_faults_loses_no_answer_and_leaves_nothing_behind(
    family: OmniFamily, loaded: Loaded
) -> None:
    plan = SoakPlan(
        seconds=20,
        concurrency=CONCURRENCY,
        seed=3,
        kill_every_s=5,
        num_lengths=3,
        sample_every_s=1,
        settled_s=0,
    )
    result = await soak(loaded.server, loaded.wanted, loaded.before, plan)
    tally = result.tally
    assert tally.is_clean, tally.wrong + tally.lost + tally.duplicated
    assert tally.sent == tally.accounted
    assert tally.exact
    assert tally.aborted
    assert tally.refused_as_expected
    assert result.kills
    assert result.filled_s is not None
    assert not result.leaked
    assert not result.changed
    assert {life.role for life in result.lives} == {"server", *family.stages}
    assert len(result.lives) == 1 + len(family.stages) + len(result.kills)


@for_families(QWEN3_OMNI)
async def test_overloaded_server_answers_what_it_accepts_and_refuses_the_rest(loaded: Loaded) -> None:
    server = loaded.server
    port = port_of(server)
    wanted = {ask: loaded.wanted[ask] for ask in spoken_asks(NUM_QUESTIONS, LONGEST)}
    # Or more, if the machine stood still while that was measured.
    rate = max(10 * await capacity(port, wanted, CONCURRENCY, 5), MAX_QUEUE)
    result = await overload(port, wanted, rate, 10, seed=4)
    assert result.is_clean, result.bad
    assert len(result.refused_s) > len(result.accepted) >= MAX_QUEUE
    assert max(accepted.seconds for accepted in result.accepted) < DEADLINE_S
    assert await first_answer_s(port, wanted) < DEADLINE_S
    with server.client() as client:
        await asyncio.to_thread(server.wait_until_idle)
        assert not await asyncio.to_thread(leaks, server, client, loaded.before)
