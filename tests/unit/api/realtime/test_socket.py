"""`/v1/realtime` over a real socket: the official client, large frames, and connections that break."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import soundfile
import websockets
from websockets.asyncio.client import ClientConnection, connect

from tests.unit.api.fake_generator import SAMPLES, TEXT
from tests.unit.api.realtime.realtime_client import base64_of
from tests.unit.api.test_server import Life, served


@asynccontextmanager
async def raw(life: Life, **options: object) -> AsyncIterator[ClientConnection]:
    address = life.address.replace("http", "ws") + "/v1/realtime?model=omni"
    async with connect(address, max_size=None, **options) as socket:  # type: ignore[arg-type]
        yield socket


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
