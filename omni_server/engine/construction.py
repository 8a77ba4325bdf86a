"""Builds one engine within a time limit, and gives up those that are no longer wanted, whole."""

import asyncio
import logging
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from vllm.v1.engine.async_llm import AsyncLLM

from omni_server.engine.engine_processes import EngineProcesses
from omni_server.engine.progress import StartProgress
from omni_server.engine.uninterrupted import uninterrupted
from omni_server.errors import ConfigError

logger = logging.getLogger(__name__)

GIVE_UP_TIMEOUT_S = 30.0
"""Longest wait for the processes of engines that were given up to end, and for a constructor to notice."""

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
    killed: dict[int, EngineProcesses] = {}
    while not building.done() and time.monotonic() < deadline:
        killed = _killed(keep()) | killed  # the first look at a process saw most
        await asyncio.wait([building], timeout=0.2)  # it may just be about to spawn the process
    await _clear_up(killed)
    if building.done() and not building.cancelled() and building.exception() is None:
        await asyncio.to_thread(building.result().shutdown)  # it came up at the last moment


def pids_of_engine_cores() -> set[int]:
    """Of this process, those that are still being built included."""
    return {child.pid for child in _engine_cores() if child.pid is not None}


async def end_engine_cores(keep: set[int]) -> None:
    """End what constructors that failed have left: all engine cores of this process but those with the ids `keep`."""
    await _clear_up(_killed(keep))


def _killed(keep: set[int]) -> dict[int, EngineProcesses]:
    """The engine cores that are not to be kept, by process id, with their workers; all have got SIGKILL."""
    killed = {}
    for child in _engine_cores():
        if child.pid is not None and child.pid not in keep:
            killed[child.pid] = EngineProcesses(child)
            killed[child.pid].kill()
    return killed


async def _clear_up(killed: dict[int, EngineProcesses]) -> None:
    deadline = time.monotonic() + GIVE_UP_TIMEOUT_S
    for pid, processes in killed.items():
        if await asyncio.to_thread(processes.wait, max(0.0, deadline - time.monotonic())):
            processes.remove_leftovers()
        else:
            logger.warning("process %d of an engine that was given up does not end after SIGKILL", pid)


def _engine_cores() -> list[BaseProcess]:
    return [child for child in multiprocessing.active_children() if child.name.startswith(_CORE_NAME)]
