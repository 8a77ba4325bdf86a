"""Connections take only a part of the file descriptors, and a new one gets in while others are idle."""

import asyncio
import json
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from omni_server.api import connections
from omni_server.api.config import TlsFiles
from tests.unit.api.clients import chat
from tests.unit.api.fake_generator import FakeGenerator, Wait, text_script
from tests.unit.api.test_request_heads import CHAT, DEADLINE_S, GET, connected, respond, rest_of
from tests.unit.api.test_server import QUIET, Life, client_of, served
from tests.unit.api.test_tls import Certificate, certificate  # noqa: F401 - a fixture

CONFIG = replace(QUIET, max_queue=10)
BODY = json.dumps(chat()).encode()
REQUEST = CHAT + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@contextmanager
def descriptor_limit(num_free: int) -> Iterator[int]:
    """So many descriptors can be opened in addition to those in use. Yields the limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = lowest_free() + num_free
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, before[1]))
    try:
        yield number
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def lowest_free() -> int:
    with Path(os.devnull).open() as file:
        return file.fileno()


@asynccontextmanager
async def connected_clients(
    life: Life, number: int
) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    """Their ends of the connections take descriptors of this process, too."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(connected(life)) for _ in range(number)]


async def is_live(life: Life) -> bool:
    async with connected(life) as (reader, writer):
        writer.write(GET + b"\r\n")
        return await respond(reader) == 200


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("start", [b"", GET], ids=["silent", "unfinished heads"])
async def test_a_health_check_is_answered_and_descriptors_stay_free_among_many_idle_connections(
    start: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life()
    with descriptor_limit(400) as limit:
        async with served(life, CONFIG), connected_clients(life, 200) as clients:
            for _, writer in clients:
                writer.write(start)
            assert await is_live(life)
            assert lowest_free() < 0.8 * limit
            oldest, youngest = clients[0], clients[-1]
            assert await rest_of(oldest[0]) == b""
            youngest[1].write(b"\r\n" if start else GET + b"\r\n")
            assert await respond(youngest[0]) == 200
    (warning,) = warnings_of(caplog)
    assert "file descriptors are in use" in warning


async def test_connections_whose_requests_are_being_answered_stay_and_a_new_one_is_closed() -> None:
    go_on = asyncio.Event()
    life = Life(FakeGenerator(script=[Wait(go_on), *text_script()]))
    generations = life.generator.generations
    with descriptor_limit(200):
        async with served(life, replace(CONFIG, max_queue=100)), connected_clients(life, 20) as idle:
            async with AsyncExitStack() as stack:
                active: list[asyncio.StreamReader] = []
                while len(generations) == len(active):
                    reader, writer = await stack.enter_async_context(connected(life))
                    active.append(reader)
                    writer.write(REQUEST)
                    async with asyncio.timeout(DEADLINE_S):
                        while len(generations) < len(active) and not reader.at_eof():  # noqa: ASYNC110
                            await asyncio.sleep(0.01)
                refused = active.pop()
                assert refused.at_eof()
                assert all(reader.at_eof() for reader, _ in idle)
                go_on.set()
                assert [await respond(reader) for reader in active] == [200] * len(active)
            assert len(active) > 50
            assert await is_live(life)


async def test_handshakes_that_do_not_end_make_room_for_others(certificate: Certificate) -> None:  # noqa: F811
    life = Life()
    config = replace(CONFIG, tls=TlsFiles(certificate.certfile, certificate.keyfile))
    with descriptor_limit(300) as limit:
        async with served(life, config):
            host, _, port = life.address.removeprefix("https://").partition(":")
            clients = [await asyncio.open_connection(host, int(port)) for _ in range(220)]
            async with client_of(life.address, verify=False) as client:
                assert (await client.get("/live")).status_code == 200
            assert lowest_free() < 0.9 * limit
            for _, writer in clients:
                writer.close()


async def test_without_descriptors_the_server_waits_with_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_RETRY_S", 0.05)
    life = Life()
    async with served(life, CONFIG):
        host, _, port = life.address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))):  # blocking: the server has not accepted it
            with descriptor_limit(0):
                await asyncio.sleep(0.5)
            assert await is_live(life)
    (warning,) = warnings_of(caplog)
    assert "cannot accept connections" in warning


async def test_no_more_requests_run_than_there_are_descriptors_for(caplog: pytest.LogCaptureFixture) -> None:
    life = Life()
    with descriptor_limit(100) as limit:
        async with served(life), client_of(life.address) as client:
            metrics = (await client.get("/metrics")).text
    assert f"omni_requests_in_flight_limit {limit // 2}.0" in metrics
    (warning,) = warnings_of(caplog)
    assert f"at most {limit // 2} requests at a time" in warning
