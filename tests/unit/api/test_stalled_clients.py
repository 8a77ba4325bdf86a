"""A client that does not read gives its place back; one that reads slowly is served."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx2
import numpy as np
import pytest

from omni_server.types import AudioDelta, TextDelta
from tests.unit.api.clients import SPEECH, URL, chat, error_of
from tests.unit.api.fake_generator import FakeGenerator, Hang, ScriptEntry, Wait, finished
from tests.unit.api.test_auth import KEY, bearer
from tests.unit.api.test_server import QUIET, Life, client_of, served

IMPATIENT = replace(QUIET, api_keys=(KEY,), max_queue=2, max_concurrency_per_key=1, http_send_timeout_s=0.2)
SILENCE = np.zeros(100_000, np.float32)
# More than the buffers of both sides hold.
TEXT: list[ScriptEntry] = [TextDelta("x" * 100_000, (index,)) for index in range(100)]
SOUND: list[ScriptEntry] = [AudioDelta(index * len(SILENCE), SILENCE) for index in range(100)]
SPEECH_URL = "/v1/audio/speech"
TO_SAY = {"model": "omni", "input": "hi", "voice": "Ethan", "response_format": "pcm"}


@asynccontextmanager
async def connection(life: Life, path: str, body: Any) -> AsyncIterator[asyncio.StreamReader]:
    """A request has been sent; little of the answer arrives unless it is read."""
    host, _, port = life.address.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    data = json.dumps(body).encode()
    head = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}",
        f"Authorization: Bearer {KEY}",
        "Content-Type: application/json",
        "Connection: close",
    ]
    writer.write("\r\n".join([*head, f"Content-Length: {len(data)}", "", ""]).encode() + data)
    try:
        yield reader
    finally:
        writer.close()


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """All that still comes, up to the end or the reset of the connection."""
    data = b""
    try:
        while piece := await asyncio.wait_for(reader.read(65536), 10):
            data += piece
    except ConnectionResetError:
        return data
    return data


async def metric(client: httpx2.AsyncClient, name: str) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)


@pytest.mark.parametrize(
    ("path", "body", "script"),
    [
        (URL, chat(stream=True), TEXT),
        (URL, chat(**SPEECH, stream=True), SOUND),
        (SPEECH_URL, TO_SAY, SOUND),
        (SPEECH_URL, TO_SAY | {"stream_format": "sse"}, SOUND),
    ],
)
async def test_client_that_reads_nothing_is_cut_off(
    path: str, body: dict[str, Any], script: list[ScriptEntry], caplog: pytest.LogCaptureFixture
) -> None:
    go_on = asyncio.Event()
    life = Life(FakeGenerator(script=[Wait(go_on), *script, Hang()]))
    async with (
        served(life, IMPATIENT),
        client_of(life.address, headers=bearer(KEY)) as client,
        connection(life, path, body) as unread,
    ):
        await asyncio.wait_for(life.generator.submitted.wait(), 10)
        refusal = await client.post(URL, json=chat())
        assert error_of(refusal, 429)["code"] == "rate_limit_exceeded"
        go_on.set()
        await asyncio.wait_for(life.generator.generations[0].closed.wait(), 20)
        async with asyncio.timeout(10):
            while await metric(client, "omni_requests_in_flight"):  # noqa: ASYNC110 - a server can only be asked
                await asyncio.sleep(0.01)
        assert await metric(client, 'omni_requests_total{outcome="aborted",reason=""}') == 1
        assert await metric(client, "omni_requests_running") == 0
        life.generator.script = None
        assert (await client.post(URL, json=chat())).status_code == 200  # the key has its place again
        assert not (await rest_of(unread)).endswith(b"0\r\n\r\n"), "it looks like a whole answer"
    assert "took nothing for 0.2 s" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_whole_answer_that_is_not_taken_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    life = Life(FakeGenerator(script=[*TEXT, finished()]))
    async with served(life, IMPATIENT), connection(life, URL, chat()) as unread:
        async with asyncio.timeout(20):
            while "took nothing" not in caplog.text:  # noqa: ASYNC110 - the request is over long before
                await asyncio.sleep(0.01)
        assert len(await rest_of(unread)) < 10_000_000


async def test_client_that_reads_slowly_gets_everything() -> None:
    life = Life(FakeGenerator(script=[*TEXT, finished()]))
    config = replace(IMPATIENT, http_send_timeout_s=3.0)  # this process may stand still for a while
    async with served(life, config), connection(life, URL, chat(stream=True)) as reader:
        data = b""
        for _ in range(35):  # longer than the deadline
            data += await reader.read(65536)
            await asyncio.sleep(0.1)
        data += await rest_of(reader)
    assert data.endswith(b"0\r\n\r\n")
    assert b"data: [DONE]" in data
