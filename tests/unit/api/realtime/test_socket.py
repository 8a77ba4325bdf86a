"""`/v1/realtime` over a real socket: the official client, large frames, and connections that break."""

import asyncio
import base64
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import websockets
from openai import AsyncOpenAI
from openai.types.realtime import RealtimeServerEvent
from websockets.asyncio.client import ClientConnection, connect

from omni_server.types import AudioDelta, TextDelta
from tests.unit.api.clients import media
from tests.unit.api.fake_generator import SAMPLES, TEXT, FakeGenerator, Hang, ScriptEntry
from tests.unit.api.realtime.realtime_client import ALLOWED, Event, base64_of
from tests.unit.api.test_metrics import parsed, value
from tests.unit.api.test_server import QUIET, Life, client_of, served

KEY = "sk-of-the-browser"
GUARDED = replace(QUIET, api_keys=(KEY,))
ENDLESS: list[ScriptEntry] = [TextDelta("Once", (1,)), AudioDelta(0, SAMPLES[:4000]), Hang()]


def official(life: Life) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{life.address}/v1", api_key="EMPTY", max_retries=0)


def json_of(event: RealtimeServerEvent) -> Event:
    return event.model_dump()


async def gauges(life: Life) -> dict[str, float]:
    """What the server says that it is doing."""
    async with client_of(life.address) as client:
        text = (await client.get("/metrics")).text
    names = ("omni_requests_running", "omni_websocket_sessions")
    return {name: value(parsed(text), name) for name in names}


@asynccontextmanager
async def raw(life: Life, **options: object) -> AsyncIterator[ClientConnection]:
    address = life.address.replace("http", "ws") + "/v1/realtime?model=omni"
    async with connect(address, max_size=None, **options) as socket:  # type: ignore[arg-type]
        yield socket


async def test_the_official_client_is_answered_by_voice() -> None:
    life = Life()
    async with served(life), official(life) as client, client.realtime.connect(model="omni") as connection:
        sound, transcript = b"", ""
        async with asyncio.timeout(20):
            async for event in connection:
                assert event.type in ALLOWED
                match event.type:
                    case "session.created":
                        await connection.session.update(
                            session={
                                "type": "realtime",
                                "instructions": "Be brief.",
                                "output_modalities": ["audio"],
                            }
                        )
                    case "session.updated":
                        await connection.conversation.item.create(
                            item={
                                "type": "message",
                                "role": "user",
                                "content": [{"type": "input_text", "text": "hi"}],
                            }
                        )
                        await connection.response.create()
                    case "response.output_audio.delta":
                        sound += base64.b64decode(event.delta)
                    case "response.output_audio_transcript.delta":
                        transcript += event.delta
                    case "response.done":
                        assert event.response.status == "completed"
                        break
        assert transcript == TEXT
        assert len(sound) == 2 * len(SAMPLES)


async def test_the_official_client_is_interrupted_by_real_speech() -> None:
    """Real speech, the real detector: the turn is found and answered, and the next one interrupts the
    answer."""
    life = Life(FakeGenerator(script=ENDLESS))
    samples = np.frombuffer(media("speech_hello.wav")[44:], dtype="<i2")
    at_24_khz = np.interp(np.arange(0, len(samples), 2 / 3), np.arange(len(samples)), samples).astype("<i2")
    async with served(life), official(life) as client, client.realtime.connect(model="omni") as connection:

        async def speak() -> None:
            for begin in range(0, len(at_24_khz), 2400):
                audio = base64_of(at_24_khz[begin : begin + 2400].tobytes())
                await connection.input_audio_buffer.append(audio=audio)

        async def until(kind: str) -> Event:
            async with asyncio.timeout(20):
                while True:
                    event = await connection.recv()
                    assert event.type in ALLOWED
                    if event.type == kind:
                        return json_of(event)

        await speak()
        await connection.input_audio_buffer.append(audio=base64_of(bytes(48_000)))
        started = await until("input_audio_buffer.speech_started")
        stopped = await until("input_audio_buffer.speech_stopped")
        assert started["item_id"] == stopped["item_id"]
        item_id = (await until("response.output_audio.delta"))["item_id"]
        await speak()
        done = await until("response.done")
        assert done["response"]["status_details"]["reason"] == "turn_detected"
        await connection.conversation.item.truncate(item_id=item_id, content_index=0, audio_end_ms=100)
        assert (await until("conversation.item.truncated"))["item_id"] == item_id


async def test_the_official_client_gets_errors_and_goes_on() -> None:
    life = Life()
    async with served(life), official(life) as client, client.realtime.connect(model="omni") as connection:
        assert (await connection.recv()).type == "session.created"
        await connection.response.cancel(event_id="mine")
        error = json_of(await connection.recv())["error"]
        assert (error["code"], error["event_id"]) == ("response_cancel_not_active", "mine")
        await connection.input_audio_buffer.clear()
        assert (await connection.recv()).type == "input_audio_buffer.cleared"


async def test_an_unknown_model_is_a_404_at_the_upgrade() -> None:
    life = Life()
    async with served(life), official(life) as client:
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with client.realtime.connect(model="gpt-realtime"):
                raise AssertionError("connected")
    assert refused.value.response.status_code == 404
    assert b"model_not_found" in (refused.value.response.body or b"")


async def test_the_subprotocol_is_answered() -> None:
    life = Life()
    offered = [websockets.Subprotocol("realtime"), websockets.Subprotocol("openai-insecure-api-key.sk")]
    async with served(life), raw(life, subprotocols=offered) as socket:
        assert socket.subprotocol == "realtime"
        assert '"session.created"' in str(await asyncio.wait_for(socket.recv(), 10))


async def test_a_key_opens_the_session_in_a_header_or_a_subprotocol() -> None:
    life = Life()
    browser = [websockets.Subprotocol("realtime"), websockets.Subprotocol(f"openai-insecure-api-key.{KEY}")]
    async with served(life, GUARDED):
        async with raw(life, subprotocols=browser) as socket:
            assert socket.subprotocol == "realtime"
            assert '"session.created"' in str(await asyncio.wait_for(socket.recv(), 10))
        async with (
            AsyncOpenAI(base_url=f"{life.address}/v1", api_key=KEY) as client,
            client.realtime.connect(model="omni") as connection,
        ):
            assert (await connection.recv()).type == "session.created"


@pytest.mark.parametrize("subprotocol", [None, "openai-insecure-api-key.wrong"])
async def test_without_a_key_the_upgrade_is_a_401(subprotocol: str | None) -> None:
    life = Life()
    offered = (
        None
        if subprotocol is None
        else [websockets.Subprotocol("realtime"), websockets.Subprotocol(subprotocol)]
    )
    async with served(life, GUARDED):
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with raw(life, subprotocols=offered):
                raise AssertionError("connected")
    assert refused.value.response.status_code == 401
    assert b"invalid_api_key" in (refused.value.response.body or b"")


async def test_the_upgrade_is_answered_with_a_request_id() -> None:
    life = Life()
    async with served(life), raw(life, additional_headers={"x-request-id": "my-session"}) as socket:
        assert socket.response is not None
        assert socket.response.headers["x-request-id"] == "my-session"


async def test_fifteen_mebibytes_in_one_event_are_taken_or_refused_with_an_error() -> None:
    life = Life()
    manual = (
        '{"type":"session.update","session":{"type":"realtime","audio":{"input":{"turn_detection":null}}}}'
    )

    def append(num_bytes: int) -> str:
        return '{"type":"input_audio_buffer.append","audio":"' + base64_of(bytes(num_bytes)) + '"}'

    async with served(life), raw(life) as socket, asyncio.timeout(30):
        await socket.recv()
        await socket.send(manual)
        assert '"session.updated"' in str(await socket.recv())
        await socket.send(append(14_000_000))
        await socket.send('{"type":"input_audio_buffer.commit"}')
        assert '"input_audio_buffer.committed"' in str(await socket.recv())
        await socket.recv()
        await socket.recv()
        await socket.send(append(15 * 1024 * 1024))  # 327 s, more than the models hear
        assert "input_audio_buffer_full" in str(await socket.recv())
        await socket.send('{"type":"input_audio_buffer.clear"}')
        assert "cleared" in str(await socket.recv())


async def test_dropping_the_connection_frees_the_session() -> None:
    life = Life(FakeGenerator(script=ENDLESS))
    async with served(life):
        async with raw(life) as socket:
            await socket.send('{"type":"response.create"}')
            while '"response.output_audio.delta"' not in str(await asyncio.wait_for(socket.recv(), 10)):
                continue
            assert await gauges(life) == {"omni_requests_running": 1, "omni_websocket_sessions": 1}
            socket.transport.abort()
        await asyncio.wait_for(life.generator.generations[0].closed.wait(), 5)
        for _ in range(200):
            if not any((await gauges(life)).values()):
                return
            await asyncio.sleep(0.02)
        raise AssertionError(await gauges(life))


async def test_a_server_that_is_stopped_says_goodbye_to_sessions() -> None:
    life = Life()
    async with served(life) as running, raw(life) as socket:
        await socket.recv()
        os.kill(os.getpid(), signal.SIGTERM)
        assert "server_shutting_down" in str(await asyncio.wait_for(socket.recv(), 10))
        with pytest.raises(websockets.ConnectionClosed) as closed:
            await asyncio.wait_for(socket.recv(), 10)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1001
        assert await asyncio.wait_for(asyncio.shield(running), 20) == 0


async def test_the_example_in_the_documentation_saves_the_answer(tmp_path: Path) -> None:
    text = (Path(__file__).parents[4] / "docs" / "realtime.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    (tmp_path / "tests").symlink_to(Path(__file__).parents[3])
    life = Life()
    async with served(life):
        (tmp_path / "talk.py").write_text(code.replace("http://127.0.0.1:8091", life.address))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "talk.py",
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert printed.decode() == TEXT
    answer, rate = soundfile.read(tmp_path / "answer.wav", dtype="int16")
    assert rate == 24_000
    assert len(answer) == len(SAMPLES)
    assert len(life.generator.requests) == 1
