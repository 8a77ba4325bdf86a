"""Events of a generation as the routes get them."""

import asyncio
from contextlib import aclosing

import pytest

from omni_server.api.answer_stream import follow
from omni_server.api.state import ServerState
from omni_server.errors import OmniError, OverloadedError, StageError
from omni_server.types import OmniEvent, TextDelta
from tests.unit.api.fake_generator import FakeGeneration, Hang, ScriptEntry, Wait, finished, text_script


async def followed(script: list[ScriptEntry], state: ServerState | None = None) -> list[OmniEvent | None]:
    events = follow([FakeGeneration("a", script)], ServerState() if state is None else state)
    return [item and item[1] async for item in events]


async def test_all_events_come_in_order_and_the_last_one_ends_them() -> None:
    script = text_script()
    assert await followed([*script, Hang()]) == script


@pytest.mark.parametrize("error", [StageError("thinker", "broken"), RuntimeError("unforeseen")])
async def test_an_error_comes_behind_the_events_before_it(error: Exception) -> None:
    got: list[OmniEvent | None] = []

    async def collect() -> None:
        async for item in follow([FakeGeneration("a", [TextDelta("a", (1,)), error])], ServerState()):
            got.append(item and item[1])

    with pytest.raises(type(error)) as raised:
        await collect()
    assert raised.value is error
    assert got == [TextDelta("a", (1,))]


async def test_a_generation_that_ends_without_its_last_event_is_an_error() -> None:
    with pytest.raises(OmniError, match="before it was finished"):
        await followed([TextDelta("a", (1,))])


async def test_silence_is_told_again_and_again_and_events_are_not_silence() -> None:
    go_on = asyncio.Event()
    generation = FakeGeneration("a", [TextDelta("a", (1,)), Wait(go_on), finished()])
    async with aclosing(follow([generation], ServerState(), heartbeat_s=0.01)) as events:
        assert await anext(events) == (0, TextDelta("a", (1,)))
        assert [await anext(events) for _ in range(3)] == [None] * 3
        go_on.set()
        assert [event async for event in events if event is not None] == [(0, finished())]


async def test_no_heartbeats_pile_up_for_a_reader_who_is_late() -> None:
    generation = FakeGeneration("a", [TextDelta("a", (1,)), TextDelta("b", (2,)), finished()])
    async with aclosing(follow([generation], ServerState(), heartbeat_s=0.01)) as events:
        assert await anext(events) == (0, TextDelta("a", (1,)))
        await asyncio.sleep(0.1)
        assert [event async for event in events] == [(0, TextDelta("b", (2,))), (0, finished())]


async def test_an_abort_ends_a_generation_that_hangs() -> None:
    state = ServerState()
    following = asyncio.create_task(followed([Hang()], state))
    await asyncio.sleep(0.01)
    state.abort(OverloadedError("shutting down"))
    with pytest.raises(OverloadedError):
        await asyncio.wait_for(following, 5)


async def test_an_abort_ends_a_generation_that_never_pauses() -> None:
    state = ServerState()
    endless: list[ScriptEntry] = [TextDelta("a", (1,))] * 100_000
    async with aclosing(follow([FakeGeneration("a", endless)], state)) as events:
        await anext(events)
        state.abort(OverloadedError("shutting down"))
        with pytest.raises(OverloadedError):
            await anext(events)


async def test_a_reader_who_leaves_ends_the_iteration_of_the_generation() -> None:
    ended = asyncio.Event()

    class Watched(FakeGeneration):
        async def __aiter__(self):  # type: ignore[no-untyped-def]
            try:
                yield TextDelta("a", (1,))
                await asyncio.Event().wait()
            finally:
                ended.set()

    async with aclosing(follow([Watched("a", [])], ServerState())) as events:
        await anext(events)
    await asyncio.wait_for(ended.wait(), 5)
