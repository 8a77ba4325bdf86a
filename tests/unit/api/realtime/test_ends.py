"""Malformed events, and how sessions end."""

import asyncio

import pytest

from omni_server.api.config import ApiConfig
from omni_server.api.state import ServerState
from omni_server.errors import OverloadedError
from omni_server.types import AudioDelta, TextDelta
from tests.unit.api.fake_generator import (
    FakeGenerator,
    Hang,
    ScriptEntry,
    Wait,
    finished,
)
from tests.unit.api.realtime.answers import ENDLESS
from tests.unit.api.realtime.realtime_client import (
    Closed,
    RealtimeClient,
    realtime_app,
    voice,
)
from tests.unit.orchestrator.virtual_time import in_virtual_time


@pytest.mark.parametrize(
    "frame",
    ["", "{", "[]", "NaN", '"text"', "{}", '{"type": 1}', '{"type": "output_audio_buffer.clear"}', b"\0\1"],
)
async def test_a_malformed_frame_is_an_error_and_the_session_goes_on(frame: str | bytes) -> None:
    async with RealtimeClient() as client:
        await client.opened()
        await client.send_raw(frame)
        error = (await client.until("error"))["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_event")
        assert error["event_id"] is None
        await client.say("hi")


async def test_a_client_that_leaves_frees_everything() -> None:
    generator = FakeGenerator(script=ENDLESS)
    client = RealtimeClient(generator)
    async with client:
        await client.opened()
        await client.send("response.create")
        await client.send("response.create", response={"conversation": "none"})
        await client.until("response.output_audio.delta")
    assert len(generator.generations) == 2
    assert all(generation.num_closed == 1 for generation in generator.generations)
    await asyncio.wait_for(client.state.wait_idle(), 1)


@in_virtual_time
async def test_a_session_that_has_lasted_its_time_is_closed() -> None:
    generator = FakeGenerator(script=ENDLESS)
    async with RealtimeClient(generator, config=ApiConfig(realtime_session_timeout_s=0.3)) as client:
        await client.opened()
        await client.send("response.create")
        assert (await client.until("error"))["error"]["code"] == "session_expired"
        with pytest.raises(Closed) as closed:
            await client.next()
        assert closed.value.code == 1000
    assert generator.generations[0].num_closed == 1


@in_virtual_time
async def test_an_idle_session_is_closed_but_not_while_it_is_answered() -> None:
    go_on = asyncio.Event()
    script: list[ScriptEntry] = [TextDelta("a", (1,)), Wait(go_on), finished()]
    async with RealtimeClient(
        FakeGenerator(script=script), config=ApiConfig(realtime_idle_timeout_s=0.05)
    ) as client:
        await client.opened()
        await client.send("response.create")
        await client.until("response.output_audio_transcript.delta")
        await asyncio.sleep(0.2)
        go_on.set()
        assert (await client.until("response.done"))["response"]["status"] == "completed"
        assert (await client.until("error"))["error"]["code"] == "session_expired"
        with pytest.raises(Closed):
            await client.next()


async def test_a_server_that_stops_finishes_the_answer_and_says_goodbye() -> None:
    go_on = asyncio.Event()
    script: list[ScriptEntry] = [TextDelta("a", (1,)), Wait(go_on), finished()]
    async with RealtimeClient(FakeGenerator(script=script)) as client:
        await client.opened()
        await client.send("response.create")
        await client.until("response.output_audio_transcript.delta")
        client.state.draining.set()
        error = await client.refused("response.create", response={"conversation": "none"})
        assert error["code"] == "server_shutting_down"
        idle = asyncio.create_task(client.state.wait_idle())
        await asyncio.sleep(0.05)
        assert not idle.done()
        go_on.set()
        assert (await client.until("response.done"))["response"]["status"] == "completed"
        error = (await client.next())["error"]
        assert (error["code"], error["type"]) == ("server_shutting_down", "server_error")
        with pytest.raises(Closed) as closed:
            await client.next()
        assert closed.value.code == 1001
        await asyncio.wait_for(idle, 5)


async def test_a_server_that_aborts_fails_the_answer_and_says_goodbye() -> None:
    async with RealtimeClient(FakeGenerator(script=ENDLESS)) as client:
        await client.opened()
        await client.begin()
        client.state.draining.set()
        client.state.abort(OverloadedError("The server is shutting down.", code="server_shutting_down"))
        response = (await client.until("response.done"))["response"]
        assert response["status"] == "failed"
        assert response["status_details"]["error"]["code"] == "server_shutting_down"
        with pytest.raises(Closed):
            await client.until("nothing")


async def test_a_client_that_does_not_read_is_cut_off_and_nobody_else_waits() -> None:
    minutes: list[ScriptEntry] = [AudioDelta(0, voice(60))] * 6
    generator = FakeGenerator(script=[*minutes, Hang()])
    app = realtime_app(ServerState(generator), ApiConfig(realtime_send_timeout_s=0.2))
    async with RealtimeClient(generator, app=app) as slow, RealtimeClient(generator, app=app) as other:
        await slow.opened()
        await other.opened()
        slow.reading.clear()
        await slow.send("response.create")
        await asyncio.wait_for(generator.submitted.wait(), 5)
        await other.say("hi")
        await asyncio.wait_for(asyncio.wait({slow.task}), 20)
        assert generator.generations[0].num_closed == 1
        await other.say("still here")
