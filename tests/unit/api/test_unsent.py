"""What is made and not taken is bounded, and only the answer of who does not take it is lost."""

import asyncio
import json
import tracemalloc
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omni_server.api.answer_stream import AnswerStream
from omni_server.api.state import ServerState
from omni_server.api.unsent import UnsentBudget, size_of
from omni_server.errors import InvalidRequestError
from omni_server.types import AudioDelta, SampledToken, TextDelta, TokenLogprob
from tests.unit.api.clients import SPEECH, URL, answer_of, chat
from tests.unit.api.fake_generator import FakeGenerator, Hang, ScriptEntry, finished
from tests.unit.api.schema import check_error
from tests.unit.api.test_auth import KEY, bearer
from tests.unit.api.test_server import QUIET, Life, client_of, served
from tests.unit.api.test_stalled_clients import SPEECH_URL, TO_SAY, connection, rest_of

MIB = 2**20
SECOND = np.zeros(24_000, np.float32)
MINUTES: list[ScriptEntry] = [AudioDelta(index * len(SECOND), SECOND) for index in range(300)]
SIZE = sum(size_of(event) for event in MINUTES if isinstance(event, AudioDelta))


def state_of(max_bytes: int, max_total_bytes: int = 1024 * MIB) -> ServerState:
    state = ServerState()
    state.unsent = UnsentBudget(max_bytes, max_total_bytes)
    return state


async def become(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - a budget can only be asked
        await asyncio.sleep(0.001)


async def take_one(answer: AnswerStream, state: ServerState, generator: FakeGenerator) -> Any:
    """The events of a reader who takes the first and then nothing for as long as events come."""
    events = answer.events()
    await anext(events)
    nearly_all = SIZE - 2 * size_of(AudioDelta(0, SECOND))
    await become(lambda: closed(generator) or state.unsent.num_bytes >= nearly_all)
    return events


def closed(generator: FakeGenerator) -> bool:
    return all(generation.closed.is_set() for generation in generator.generations)


async def test_a_generation_is_ended_when_too_much_of_it_waits() -> None:
    state, generator = state_of(MIB), FakeGenerator()
    async with answer_of(state, [*MINUTES, Hang()], generator=generator) as answer:
        events = await asyncio.wait_for(take_one(answer, state, generator), 10)
        assert closed(generator), "the reader did not have to come back for that"
        assert state.unsent.num_bytes == 0
        with pytest.raises(InvalidRequestError, match="reads too slowly") as raised:
            await anext(events)
    assert raised.value.code == "client_too_slow"


async def test_as_much_as_is_allowed_may_wait_and_is_given_back() -> None:
    state, generator = state_of(SIZE), FakeGenerator()
    async with answer_of(state, [*MINUTES, finished()], generator=generator) as answer:
        events = await asyncio.wait_for(take_one(answer, state, generator), 10)
        assert state.unsent.num_bytes > SIZE // 2
        assert len([event async for event in events]) == len(MINUTES)
    assert state.unsent.num_bytes == 0


async def test_what_a_reader_leaves_behind_is_given_back() -> None:
    state, generator = state_of(SIZE), FakeGenerator()
    async with answer_of(state, [*MINUTES, Hang()], generator=generator) as answer:
        await (await asyncio.wait_for(take_one(answer, state, generator), 10)).aclose()
    assert state.unsent.num_bytes == 0


async def test_of_all_answers_the_one_with_the_most_is_dropped() -> None:
    state, script = state_of(1024 * MIB, SIZE + SIZE // 2), [*MINUTES[:100], finished()]
    generator = FakeGenerator()
    async with (
        answer_of(state, [*MINUTES, Hang()], generator=generator) as greedy,
        answer_of(state, script) as modest,
    ):
        first, second = await take_one(greedy, state, generator), modest.events()
        await anext(second)
        async with answer_of(state, script) as another:
            others = another.events()
            await anext(others)
            await become(lambda: 0 < state.unsent.num_bytes < SIZE)
            with pytest.raises(InvalidRequestError):
                await anext(first)
            assert len([event async for event in second]) == 100
            assert len([event async for event in others]) == 100


async def test_choices_share_what_may_wait() -> None:
    text: list[ScriptEntry] = [TextDelta("x" * 1000, (1,))] * 2000
    state, generator = state_of(MIB), FakeGenerator()
    async with answer_of(state, [*text, Hang()], [*text, Hang()], generator=generator) as answer:
        events = answer.events()
        await anext(events)
        await asyncio.wait_for(become(lambda: closed(generator)), 10)
        with pytest.raises(InvalidRequestError, match="reads too slowly"):
            await anext(events)
    assert state.unsent.num_bytes == 0


async def test_what_a_caller_holds_counts_until_the_answer_is_dropped_or_closed() -> None:
    state = state_of(MIB)
    async with answer_of(state, [finished()]) as answer:
        for num_bytes in (1000, MIB):
            answer.hold(num_bytes)
            assert state.unsent.num_bytes == num_bytes
        for num_bytes in (MIB + 1, 1):
            with pytest.raises(InvalidRequestError, match="too large without 'stream': true"):
                answer.hold(num_bytes)
            assert state.unsent.num_bytes == 0
    async with answer_of(state, [finished()]) as answer:
        answer.hold(1000)
    assert state.unsent.num_bytes == 0


async def test_a_finished_file_that_its_client_does_not_read_makes_room_for_another() -> None:
    body = TO_SAY | {"stream": False}
    num_bytes = 48_000 * len(MINUTES)
    life = Life(FakeGenerator(script=[*MINUTES, finished()]))
    config = replace(QUIET, max_total_unsent_bytes=num_bytes * 3 // 2)
    tracemalloc.start()
    try:
        async with served(life, config), connection(life, SPEECH_URL, body) as slow:
            assert f"content-length: {num_bytes}".encode() in await slow.read(4096)
            async with client_of(life.address) as client:
                assert len((await client.post(SPEECH_URL, json=body)).content) == num_bytes
            assert tracemalloc.get_traced_memory()[0] < num_bytes
            assert len(await rest_of(slow)) < num_bytes - MIB
    finally:
        tracemalloc.stop()


def test_log_probabilities_count() -> None:
    token = TokenLogprob("a", b"a", -0.1)
    bare = TextDelta("a", (1,))
    assert size_of(replace(bare, logprobs=(SampledToken(token, (token,) * 20),))) > 20 * size_of(bare) // 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (URL, chat(**SPEECH, stream=True)),
        (SPEECH_URL, TO_SAY | {"stream_format": "sse"}),
        (SPEECH_URL, TO_SAY),
    ],
)
async def test_many_slow_clients_lose_their_answers_and_one_that_reads_gets_its_own(
    path: str, body: Any
) -> None:
    number = 20
    config = replace(QUIET, api_keys=(KEY,), max_unsent_bytes=4 * MIB, max_total_unsent_bytes=20 * MIB)
    life = Life(FakeGenerator(script=[*MINUTES, finished()]))
    async with served(life, config), AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(connection(life, path, body)) for _ in range(number)]
        heads = await asyncio.gather(*(reader.read(4096) for reader in slow))
        assert all(head.startswith(b"HTTP/1.1 200") for head in heads)
        generations = life.generator.generations
        async with asyncio.timeout(20):
            await asyncio.gather(*(generation.closed.wait() for generation in generations))
        assert len(generations) == number
        async with client_of(life.address, headers=bearer(KEY)) as client:
            life.generator.script = [*MINUTES[:10], finished()]
            whole = await client.post(path, json=body)
            assert whole.status_code == 200
            assert f"omni_slow_client_disconnects_total {number}.0" in (await client.get("/metrics")).text
        endings = await asyncio.gather(*(rest_of(reader) for reader in slow))
    for ending in endings:
        if body.get("stream") or "stream_format" in body:
            last = ending.rstrip(b"0\r\n").rpartition(b"data: ")[2].strip()
            error = json.loads(last)
            check_error(error)
            assert error["error"]["code"] == "client_too_slow"
        else:
            assert not ending.endswith(b"0\r\n\r\n"), "it looks like a whole file"
