"""Engines that are given up while they are built; stand-ins for vLLM's, with processes of vLLM's name."""

import asyncio
import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from omni_server.engine.construction import construct, end_engine_cores, pids_of_engine_cores
from omni_server.engine.progress import StartProgress
from omni_server.errors import ConfigError
from tests.unit.engine import fake_children

SLOW_S = 1.0
"""What a constructor does before it starts its process; longer than the time that it is given."""
TIMEOUT_S = 30.0


class World:
    def __init__(self) -> None:
        self.num_building = 0
        self.started: list[BaseProcess] = []
        self.semaphores: list[Path] = []
        self.others = pids_of_engine_cores()
        """Engines of whoever else uses this process: pipelines of other tests live until the last one."""

    def core(self) -> BaseProcess:
        return self._core(time.sleep, 600)

    def core_with_a_semaphore(self) -> BaseProcess:
        """As torch and tqdm make some while an engine starts."""
        told, tells = multiprocessing.get_context("spawn").Pipe(duplex=False)
        child = self._core(fake_children.hold_a_semaphore, tells)
        assert told.poll(TIMEOUT_S)
        self.semaphores.append(Path("/dev/shm") / f"sem.{told.recv().removeprefix('/')}")
        return child

    def _core(self, run: Callable[..., None], *args: Any) -> BaseProcess:
        child = multiprocessing.get_context("spawn").Process(target=run, args=args, name="EngineCore")
        child.start()
        self.started.append(child)
        return child

    def cores(self) -> set[int]:
        return pids_of_engine_cores() - self.others

    def build(self) -> AsyncLLM:
        """As vLLM's constructor does: waits until the process is ready or has ended."""
        self.num_building += 1
        try:
            time.sleep(SLOW_S)
            self.core().join()
            raise RuntimeError("Engine core initialization failed")
        finally:
            self.num_building -= 1


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for child in world.started:
        child.kill()
        child.join()
    assert pids_of_engine_cores() >= world.others


async def build(
    world: World, name: str, constructor: Callable[[], AsyncLLM], timeout_s: float, keep: frozenset[int] = frozenset()
) -> AsyncLLM:
    with StartProgress(lambda line: None) as progress:
        progress.began(name)
        return await construct(name, constructor, timeout_s, lambda: world.others | keep, progress)


async def test_stages_that_run_out_of_time_together_are_all_given_up(world: World) -> None:
    async def all_stages() -> None:
        async with asyncio.TaskGroup() as group:
            for name in ("thinker", "talker", "code2wav"):
                group.create_task(build(world, name, world.build, 0.1))

    with pytest.raises(ExceptionGroup) as caught:
        await all_stages()
    assert isinstance(caught.value.exceptions[0], ConfigError)
    assert world.num_building == 0
    assert not world.cores()


async def test_being_cancelled_again_and_again_leaves_no_constructor_at_work(world: World) -> None:
    task = asyncio.create_task(build(world, "talker", world.build, 60.0))
    while not task.done():
        await asyncio.sleep(0.05)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.num_building == 0
    assert not world.cores()


async def test_engines_that_are_to_be_kept_live_on(world: World) -> None:
    other = world.core()
    keep = frozenset(world.cores())
    with pytest.raises(ConfigError, match=r"stage 'talker' was not ready after 0\.1 s \(start_timeout_s\)"):
        await build(world, "talker", world.build, 0.1, keep)
    assert other.is_alive()
    assert len(world.started) == 2
    assert world.cores() == keep


async def test_process_of_a_failed_constructor_is_ended(world: World) -> None:
    def leaves_its_process() -> AsyncLLM:
        world.core()
        raise ValueError("block_size 7")

    other = world.core()
    keep = frozenset(world.cores())
    with pytest.raises(ConfigError, match="stage 'talker' did not start: block_size 7"):
        await build(world, "talker", leaves_its_process, 60.0, keep)
    await end_engine_cores(world.others | keep)
    assert other.is_alive()
    assert world.cores() == keep


async def test_engine_that_is_up_at_the_last_moment_is_shut_down(world: World) -> None:
    shut_down = threading.Event()

    class Engine:
        def shutdown(self) -> None:
            shut_down.set()

    def in_the_end() -> AsyncLLM:
        time.sleep(SLOW_S)
        return cast(AsyncLLM, Engine())

    with contextlib.suppress(ConfigError):
        await build(world, "talker", in_the_end, 0.1)
    assert shut_down.is_set()


async def test_semaphores_of_an_engine_that_is_given_up_are_removed(world: World) -> None:
    """Else they stay until the server ends, and Python says then that they were forgotten."""
    has_semaphore = threading.Event()

    def build_with_a_semaphore() -> AsyncLLM:
        core = world.core_with_a_semaphore()
        has_semaphore.set()
        core.join()
        raise RuntimeError("Engine core initialization failed")

    task = asyncio.create_task(build(world, "talker", build_with_a_semaphore, 60.0))
    assert await asyncio.to_thread(has_semaphore.wait, TIMEOUT_S)
    assert [file.exists() for file in world.semaphores] == [True]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [file.exists() for file in world.semaphores] == [False]


async def test_semaphores_that_a_failed_constructor_leaves_are_removed(world: World) -> None:
    def leaves_its_process() -> AsyncLLM:
        world.core_with_a_semaphore()
        raise ValueError("block_size 7")

    with pytest.raises(ConfigError):
        await build(world, "talker", leaves_its_process, 60.0)
    assert [file.exists() for file in world.semaphores] == [True]
    await end_engine_cores(world.others)
    assert [file.exists() for file in world.semaphores] == [False]
    assert not world.cores()
