"""Events of a generation as the routes get them."""

import asyncio
from contextlib import aclosing

import pytest

from omni_server.api.state import ServerState
from omni_server.errors import OverloadedError
from omni_server.types import TextDelta
from tests.unit.api.clients import answer_of
from tests.unit.api.fake_generator import ScriptEntry, finished


async def test_no_heartbeats_pile_up_for_a_reader_who_is_late() -> None:
    script: list[ScriptEntry] = [TextDelta("a", (1,)), TextDelta("b", (2,)), finished()]
    async with answer_of(ServerState(), script) as answer, aclosing(answer.events(0.01)) as events:
        assert await anext(events) == (0, TextDelta("a", (1,)))
        await asyncio.sleep(0.1)
        assert [event async for event in events] == [(0, TextDelta("b", (2,))), (0, finished())]


async def test_an_abort_ends_a_generation_that_never_pauses() -> None:
    state = ServerState()
    endless: list[ScriptEntry] = [TextDelta("a", (1,))] * 100_000
    async with answer_of(state, endless) as answer, aclosing(answer.events()) as events:
        await anext(events)
        state.abort(OverloadedError("shutting down"))
        with pytest.raises(OverloadedError):
            await anext(events)
