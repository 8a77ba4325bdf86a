"""The life of the server: a real socket, real signals, a generator that follows a script."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx2
import pytest
import uvicorn

from omni_server.api.config import ApiConfig
from omni_server.api.listener import listen
from omni_server.api.server import run_server
from omni_server.errors import ConfigError
from omni_server.generation import Generator
from omni_server.types import ModelInfo, TextDelta
from tests.unit.api.clients import URL, chat, error_of
from tests.unit.api.fake_generator import (
    EDITING_MODEL,
    IMAGE_MODEL,
    MODEL,
    FakeGenerator,
    Hang,
    Wait,
    text_script,
)
from tests.unit.api.sse_validator import parse_frames, read_stream


@dataclass
class Life:
    """What happened to the generator, and the server's address."""

    generator: FakeGenerator = field(default_factory=FakeGenerator)
    address: str = ""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    num_starts: int = 0
    num_stops: int = 0
    start_cancelled: bool = False

    def on_ready(self, address: str) -> None:
        self.address = address
        self.ready.set()

    async def start(self) -> Generator:
        self.num_starts += 1
        return self.generator

    async def stop(self, generator: Generator) -> None:
        assert generator is self.generator
        self.num_stops += 1


@pytest.fixture
def port() -> Iterator[int]:
    """Bound, so that no other process gets it. The server sets SO_REUSEADDR and can listen on it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


QUIET = ApiConfig(port=0, access_log=False, log_level="warning", shutdown_timeout_s=20)


@asynccontextmanager
async def served(
    life: Life, config: ApiConfig = QUIET, start: Callable[[], Awaitable[Generator]] | None = None
) -> AsyncIterator["asyncio.Task[int]"]:
    """`run_server` in the background; ended by SIGTERM if it still runs."""
    running = asyncio.create_task(run_server(start or life.start, life.stop, config, life.on_ready))
    try:
        if start is None:
            await asyncio.wait_for(life.ready.wait(), 10)
        yield running
    finally:
        if not running.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(asyncio.wait({running}), 20)


def client_of(base_url: str, **options: object) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=base_url, timeout=10, **options)  # type: ignore[arg-type]


async def answering(url: str, path: str) -> httpx2.Response:
    """The answer of a server that may not listen yet."""
    async with client_of(url) as client:
        for _ in range(200):
            try:
                return await client.get(path)
            except httpx2.ConnectError:
                await asyncio.sleep(0.02)
    raise AssertionError("the server does not listen")


async def exit_code(running: "asyncio.Task[int]") -> int:
    return await asyncio.wait_for(asyncio.shield(running), 20)


async def test_server_answers_and_sigterm_ends_it_with_zero() -> None:
    life = Life()
    async with served(life) as running, client_of(life.address) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.post(URL, json=chat())).status_code == 200
        assert read_stream((await client.post(URL, json=chat(stream=True))).text).finish_reason == "stop"
        os.kill(os.getpid(), signal.SIGTERM)
        assert await exit_code(running) == 0
    assert (life.num_starts, life.num_stops) == (1, 1)


async def test_probes_are_answered_while_the_model_loads(port: int) -> None:
    life = Life()
    loaded = asyncio.Event()

    async def start() -> Generator:
        await loaded.wait()
        return life.generator

    url = f"http://127.0.0.1:{port}"
    async with served(life, replace(QUIET, port=port), start):
        assert error_of(await answering(url, "/health"), 503)["code"] == "model_not_ready"
        assert (await answering(url, "/live")).status_code == 200
        async with client_of(url) as client:
            response = await client.post(URL, json=chat())
        assert error_of(response, 503)["code"] == "model_not_ready"
        assert int(response.headers["retry-after"]) > 0
        assert not life.ready.is_set()
        loaded.set()
        await asyncio.wait_for(life.ready.wait(), 10)
        assert life.address == url
        assert (await answering(url, "/ready")).status_code == 200


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (IMAGE_MODEL, ApiConfig(max_output_pixels=1023), "smallest image of the model has 1024 pixels"),
        (EDITING_MODEL, ApiConfig(max_output_pixels=255), "smallest image of the model has 256 pixels"),
        (EDITING_MODEL, ApiConfig(max_unsent_bytes=12 * 4096 - 1), "4 images of 4096 pixels has 49152"),
        (
            EDITING_MODEL,
            ApiConfig(max_output_pixels=1024, max_unsent_bytes=12 * 1024 - 1),
            "4 images of 1024 pixels has 12288",
        ),
    ],
)
async def test_limits_that_no_image_fits_end_the_start(
    model: ModelInfo, config: ApiConfig, message: str
) -> None:
    life = Life(FakeGenerator(model))
    with pytest.raises(ConfigError, match=message):
        await asyncio.wait_for(
            run_server(life.start, life.stop, replace(config, port=0, log_level="warning"), life.on_ready), 10
        )
    assert (life.num_stops, life.ready.is_set()) == (1, False)


@pytest.mark.parametrize("model", [MODEL, EDITING_MODEL])
async def test_limits_that_images_just_fit_are_served(model: ModelInfo) -> None:
    config = replace(QUIET, max_output_pixels=256, max_unsent_bytes=12 * 256)
    async with served(Life(FakeGenerator(model)), config) as running:
        assert not running.done()


async def test_port_in_use_is_found_before_the_model_loads() -> None:
    life = Life()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{number}: Address already in use"):
            await run_server(life.start, life.stop, replace(QUIET, port=number), life.on_ready)
    assert life.num_starts == 0


def test_port_is_taken_from_the_first_moment(port: int) -> None:
    config = replace(QUIET, port=port)
    with listen(config), pytest.raises(ConfigError, match="Address already in use"):
        listen(config)


async def test_web_server_that_ends_by_itself_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(self: uvicorn.Server, sockets: object) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(uvicorn.Server, "serve", serve)
    life = Life()
    assert await asyncio.wait_for(run_server(life.start, life.stop, QUIET, life.on_ready), 10) == 1
    assert life.num_stops == 1


@pytest.mark.parametrize(
    "change", [{"host": "192.0.2.1"}, {"host": "no.such.host.invalid"}, {"port": 70_000}]
)
async def test_address_that_is_none_is_a_configuration_error(change: dict[str, object]) -> None:
    life = Life()
    with pytest.raises(ConfigError, match="cannot listen on"):
        await run_server(life.start, life.stop, replace(QUIET, **change), life.on_ready)  # type: ignore[arg-type]
    assert life.num_starts == 0


async def test_failing_start_is_raised_and_frees_the_port(port: int) -> None:
    life = Life()

    async def start() -> Generator:
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        await run_server(start, life.stop, replace(QUIET, port=port), life.on_ready)
    assert life.num_stops == 0
    async with served(life, replace(QUIET, port=port)):
        assert (await answering(life.address, "/health")).status_code == 200


async def test_sigterm_while_the_model_loads_cancels_loading() -> None:
    life = Life()
    started = asyncio.Event()

    async def start() -> Generator:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            life.start_cancelled = True
            raise
        raise AssertionError

    async with served(life, QUIET, start) as running:
        await asyncio.wait_for(started.wait(), 10)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await exit_code(running) == 128 + signal.SIGTERM
    assert life.start_cancelled
    assert (life.num_stops, life.ready.is_set()) == (0, False)


async def test_running_stream_is_finished_while_new_requests_are_refused() -> None:
    go_on = asyncio.Event()
    life = Life(FakeGenerator(script=[TextDelta("a", (1,)), Wait(go_on), *text_script()]))
    async with (
        served(life) as running,
        client_of(life.address) as client,
        client.stream("POST", URL, json=chat(stream=True)) as response,
    ):
        lines = response.aiter_lines()
        body = [await anext(lines)]
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(500):
            refusal = await client.get("/ready")
            if refusal.status_code != 200:
                break
        assert error_of(refusal, 503)["code"] == "server_shutting_down"
        assert error_of(await client.post(URL, json=chat()), 503)["code"] == "server_shutting_down"
        assert (await client.get("/health")).status_code == 200
        assert not running.done()
        go_on.set()
        body += [line async for line in lines]
        assert read_stream("\n".join(body) + "\n").finish_reason == "stop"
        assert await exit_code(running) == 0
    assert life.num_stops == 1


@pytest.mark.parametrize("end", ["timeout", "second SIGINT"])
async def test_stream_that_does_not_end_is_aborted(end: str) -> None:
    life = Life(FakeGenerator(script=[Hang()]))
    config = replace(QUIET, shutdown_timeout_s=0.05 if end == "timeout" else 1000.0)
    async with (
        served(life, config) as running,
        client_of(life.address) as client,
        client.stream("POST", URL, json=chat(stream=True)) as response,
    ):
        lines = response.aiter_lines()
        body = [await anext(lines)]
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.01)
        if end == "second SIGINT":
            assert not running.done()
            os.kill(os.getpid(), signal.SIGINT)
        body += [line async for line in lines]
        assert '"code":"server_shutting_down"' in parse_frames("\n".join(body) + "\n")[-1]
        assert await exit_code(running) == 0
    assert life.generator.generations[0].num_closed == 1
    assert life.num_stops == 1


async def test_dead_engine_ends_streams_with_an_error_and_the_server_with_one() -> None:
    life = Life(FakeGenerator(script=[Hang()]))
    async with (
        served(life) as running,
        client_of(life.address) as client,
        client.stream("POST", URL, json=chat(stream=True)) as response,
    ):
        lines = response.aiter_lines()
        body = [await anext(lines)]
        life.generator.alive = False
        assert error_of(await client.get("/health"), 503)["code"] == "engine_dead"
        body += [line async for line in lines]
        assert '"code":"engine_dead"' in parse_frames("\n".join(body) + "\n")[-1]
        assert await exit_code(running) == 1
    assert life.num_stops == 1


async def test_server_listens_on_a_unix_socket_and_removes_it(tmp_path: Path) -> None:
    path = tmp_path / "omni.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # left behind
    life = Life()
    config = replace(QUIET, uds=str(path))
    async with served(life, config):
        assert life.address == f"unix:{path}"
        transport = httpx2.AsyncHTTPTransport(uds=str(path))
        async with client_of("http://server", transport=transport) as client:
            assert (await client.get("/health")).status_code == 200
        with pytest.raises(ConfigError, match="Address already in use"):
            await run_server(life.start, life.stop, config, life.on_ready)
        assert path.exists()
    assert not path.exists()
