"""How an engine is built and given up; stand-ins for vLLM's engine and client, with processes and sockets."""

import asyncio
import multiprocessing
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.network_utils import make_zmq_socket
from vllm.v1.engine.async_llm import AsyncLLM

from omni_server.engine import construction
from omni_server.engine.construction import BuiltEngine, build_engine
from omni_server.engine.process_files import shared_files_of
from omni_server.engine.start_progress import StartProgress
from omni_server.errors import ConfigError
from tests.unit.engine import fake_engine

TIMEOUT_S = 60.0
Engine = Callable[[str], None]


class Client:
    """As vLLM's: its constructor returns when the engine has greeted it."""

    made: list["Client"]

    def __init__(
        self, config: Any, executor_class: Any, *, client_addresses: dict[str, Any], **_: object
    ) -> None:
        self.is_shut_down = threading.Event()
        Client.made.append(self)
        address, listener = client_addresses["input_address"], client_addresses["input_listener"]
        self.wait(Path(address.removeprefix("ipc://")).parent)
        with (
            zmq.Context() as context,
            make_zmq_socket(context, address, zmq.ROUTER, listener=listener) as socket,
        ):
            assert socket.poll(TIMEOUT_S * 1000)

    def wait(self, folder: Path) -> None:
        """Before it looks at its socket, which is in `folder`."""

    def shutdown(self) -> None:
        self.is_shut_down.set()


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[BaseProcess] = []
        self.is_starting, self.may_start, self.has_started = (threading.Event() for _ in range(3))
        self.may_start.set()
        self.lines: list[str] = []

    def runs(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        """`engine` is what runs in place of vLLM's engine core."""

        def start_process(run: object, environment: dict[str, str], arguments: dict[str, Any]) -> BaseProcess:
            self.is_starting.set()
            assert self.may_start.wait(TIMEOUT_S)
            address = arguments["handshake_address"]
            process = multiprocessing.get_context("spawn").Process(target=engine, args=(address,))
            process.start()
            self.processes.append(process)
            self.has_started.set()
            return process

        monkeypatch.setattr(construction, "start_process", start_process)

    async def build(
        self, *, client_class: type[Client] = Client, timeout_s: float = TIMEOUT_S, name: str = "talker"
    ) -> BuiltEngine:
        with StartProgress(self.lines.append) as progress:
            progress.began(name)
            return await build_engine(
                name,
                cast(type[AsyncLLM], client_class),
                cast(AsyncEngineArgs, SimpleNamespace(create_engine_config=lambda: "config")),
                environment={},
                folder=self.folder,
                timeout_s=timeout_s,
                progress=progress,
            )

    def num_alive(self) -> int:
        return sum(process.is_alive() for process in self.processes)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(construction, "Executor", SimpleNamespace(get_class=lambda config: None))
    monkeypatch.setattr(Client, "made", [], raising=False)
    with tempfile.TemporaryDirectory(prefix="t-") as folder:  # pytest's own paths are too long for sockets
        world = World(Path(folder))
        world.runs(fake_engine.become_ready, monkeypatch)
        yield world
        for process in world.processes:
            process.kill()
            process.join()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - threads and processes are looked at
            await asyncio.sleep(0.01)


async def test_a_stage_that_is_not_ready_in_time_says_how_far_it_came(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.runs(fake_engine.never_become_ready, monkeypatch)
    expected = (
        r"stage 'talker' was not ready after 1 s \(start_timeout_s\); it had come to: starting its process"
    )
    with pytest.raises(ConfigError, match=expected):
        await world.build(timeout_s=1.0)
    await until(lambda: world.num_alive() == 0)


async def test_being_cancelled_again_and_again_leaves_no_process_and_no_client(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.runs(fake_engine.never_become_ready, monkeypatch)
    task = asyncio.create_task(world.build())
    await until(lambda: bool(Client.made))
    while not task.done():
        task.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.num_alive() == 0
    await until(Client.made[0].is_shut_down.is_set)


async def test_a_process_that_comes_after_its_engine_was_given_up_is_ended(world: World) -> None:
    world.may_start.clear()
    task = asyncio.create_task(world.build())
    await until(world.is_starting.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not world.processes
    world.may_start.set()
    await until(world.has_started.is_set)
    await until(lambda: world.num_alive() == 0)


async def test_semaphores_of_an_engine_that_is_given_up_are_removed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they stay until the server ends, and Python says then that they were forgotten."""
    world.runs(fake_engine.hold_a_semaphore, monkeypatch)
    task = asyncio.create_task(world.build())

    def semaphores() -> frozenset[str]:
        return shared_files_of([process.pid for process in world.processes if process.pid is not None])

    await until(lambda: bool(semaphores()))
    held = semaphores()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not [name for name in held if (Path("/dev/shm") / name).exists()]


class SlowClient(Client):
    """Does not look at its socket before the engine has died."""

    def wait(self, folder: Path) -> None:
        time.sleep(2.0)


async def test_an_engine_that_dies_as_soon_as_it_is_ready_is_noticed_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.runs(fake_engine.become_ready_and_fail, monkeypatch)
    expected = r"stage 'talker' did not start: its engine process has ended \(exit code 3\)"
    with pytest.raises(ConfigError, match=expected):
        await world.build(client_class=SlowClient)
    await until(lambda: bool(Client.made) and Client.made[0].is_shut_down.is_set())


class ImpatientClient(Client):
    def __init__(self, *_: object, **__: object) -> None:
        raise TimeoutError("Timed out waiting for engine core processes to start.")


async def test_a_time_limit_of_vllm_is_not_taken_for_ours(world: World) -> None:
    with pytest.raises(ConfigError, match="stage 'talker' did not start: Timed out waiting for engine core"):
        await world.build(client_class=ImpatientClient)


class LateClient(Client):
    """Opens its sockets when the folder for them has been removed."""

    def wait(self, folder: Path) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while folder.exists() and time.monotonic() < deadline:
            time.sleep(0.01)


async def test_a_client_whose_engine_was_given_up_opens_its_sockets_and_is_shut_down(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot would leave a context behind, whose end the garbage collector would wait for, for
    ever."""
    world.runs(fake_engine.never_become_ready, monkeypatch)
    world.folder = world.folder / "of this engine"
    world.folder.mkdir()
    building = asyncio.create_task(world.build(client_class=LateClient))
    await until(lambda: bool(Client.made))
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    shutil.rmtree(world.folder)
    await until(Client.made[0].is_shut_down.is_set)
