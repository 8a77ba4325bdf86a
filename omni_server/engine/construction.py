"""Builds one engine within a time limit, and gives up those that are no longer wanted, whole."""

import asyncio
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from vllm.v1.engine.async_llm import AsyncLLM

from omni_server.engine.progress import StartProgress
from omni_server.engine.uninterrupted import uninterrupted
from omni_server.errors import ConfigError

GIVE_UP_TIMEOUT_S = 30.0
"""Longest wait for a constructor to notice that its engine process is gone."""

_CORE_NAME = "EngineCore"
"""vLLM's name for the process of an engine core; that of a data-parallel rank has a number behind it."""


async def construct(
    name: str, build: Callable[[], AsyncLLM], timeout_s: float, keep: Callable[[], set[int]], progress: StartProgress
) -> AsyncLLM:
    """The engine of stage `name`, which `build` makes. The constructor does not run on after an error.

    The constructor blocks until the engine is up, so it runs in a thread. A thread cannot be stopped; where the engine
    is no longer wanted its process is killed, which lets the constructor fail. Which process is its own it does not
    tell before it is done, so all engine cores of this process are killed except those that `keep` names (process
    ids; it is asked again and again): no two engines may be built at once unless all of them are given up together.

    Raises `ConfigError`; then `end_engine_cores` should follow as soon as nothing else is built.
    """
    task = asyncio.create_task(asyncio.to_thread(build))
    try:
        return await asyncio.wait_for(asyncio.shield(task), timeout_s)
    except TimeoutError:
        # Uninterrupted: stages that start together come to the end of their time together, too, and the first to say
        # so has the others cancelled.
        await uninterrupted(_give_up(task, keep))
        reached = progress.last_phase(name) or "starting its process"
        raise ConfigError(
            f"stage '{name}' was not ready after {timeout_s:g} s (start_timeout_s); it had come to: {reached}"
        ) from None
    except asyncio.CancelledError:  # the server is being stopped, or another stage failed
        await uninterrupted(_give_up(task, keep))
        raise
    except Exception as exc:
        raise ConfigError(f"stage '{name}' did not start: {str(exc) or type(exc).__name__}") from exc


async def _give_up(building: asyncio.Task[AsyncLLM], keep: Callable[[], set[int]]) -> None:
    deadline = time.monotonic() + GIVE_UP_TIMEOUT_S
    while not building.done() and time.monotonic() < deadline:
        wanted = keep()
        for child in _engine_cores():
            if child.pid not in wanted:
                child.kill()
        await asyncio.wait([building], timeout=0.2)  # it may just be about to spawn the process
    if building.done() and not building.cancelled() and building.exception() is None:
        await asyncio.to_thread(building.result().shutdown)  # it came up at the last moment


def pids_of_engine_cores() -> set[int]:
    """Of this process, those that are still being built included."""
    return {child.pid for child in _engine_cores() if child.pid is not None}


async def end_engine_cores(keep: set[int]) -> None:
    """End what constructors that failed have left: all engine cores of this process but those with the ids `keep`."""
    left = [child for child in _engine_cores() if child.pid not in keep]
    for child in left:
        child.kill()
    for child in left:
        await asyncio.to_thread(child.join, GIVE_UP_TIMEOUT_S)


def _engine_cores() -> list[BaseProcess]:
    return [child for child in multiprocessing.active_children() if child.name.startswith(_CORE_NAME)]
