"""Keeps the stages up: what an engine leaves that died or hangs is cleared away, and another one is started."""

import asyncio
import functools
import gc
import logging
import time
from collections.abc import Mapping

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from omni_server.config.stage_config import SupervisionConfig
from omni_server.engine.async_engine import StageAsyncLLM
from omni_server.engine.construction import BuiltEngine
from omni_server.engine.engine_processes import EngineProcesses
from omni_server.engine.health_watch import until_down
from omni_server.engine.launcher import AnyStageClient, Engines
from omni_server.engine.progress import StartProgress
from omni_server.engine.restarts import CrashLoopError, Restarts
from omni_server.engine.stage_client import FRONTEND_TIMEOUT_S, KILL_TIMEOUT_S, close_frontend
from omni_server.engine.stage_launcher import StageLauncher
from omni_server.engine.uninterrupted import uninterrupted
from omni_server.errors import ConfigError

logger = logging.getLogger(__name__)


def _is_news(record: logging.LogRecord) -> bool:
    """vLLM's side of an engine reports its death with a traceback that tells no more than our one line."""
    return record.exc_info is None or not isinstance(record.exc_info[1], EngineDeadError)


def _settle_heap() -> None:
    """What the new engine has made in this process need not be looked at by the garbage collector again, where the
    program has said so of its own start (`gc.freeze`); what the dead one has left must be gone before."""
    gc.collect()
    if gc.get_freeze_count():
        gc.freeze()


class Supervisor:
    """Watches every stage from `start` to `stop`. Belongs to one event loop."""

    def __init__(self, engines: Engines, launcher: StageLauncher, policy: SupervisionConfig) -> None:
        self._engines = engines
        self._launcher = launcher
        self._policy = policy
        self._restarts = {client.name: Restarts(client.name, policy) for client in engines.clients()}
        self._tasks: list[asyncio.Task[None]] = []
        self.failed_stage: str | None = None
        """The stage that will not be started again; then the server must end."""

    def start(self) -> None:
        """All stages are up."""
        logging.getLogger(AsyncLLM.__module__).addFilter(_is_news)
        for client in self._engines.clients():
            logger.info("stage '%s' runs in process %d", client.name, client.processes.core_pid)
            self._tasks.append(asyncio.create_task(self._supervise(client), name=f"watch {client.name}"))

    @property
    def num_restarts(self) -> Mapping[str, int]:
        """Of each stage, how often it was begun to start it again."""
        return {name: restarts.count for name, restarts in self._restarts.items()}

    async def stop(self) -> None:
        """Nothing is watched any more; an engine that is being built is given up. Takes no longer than clearing up
        after a dead engine does. Harmless when not started."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _supervise(self, client: AnyStageClient) -> None:
        name, processes = client.name, client.processes
        try:
            while True:
                reason = await until_down(client, processes, self._policy.hang_timeout_s)
                began = time.monotonic()
                await self._clear_up(client, processes, reason)
                await self._restart(name)
                processes.close()
                processes = client.processes
                _settle_heap()
                took_s = time.monotonic() - began
                logger.info("stage '%s' runs again, after %.1f s, in process %d", name, took_s, processes.core_pid)
        except CrashLoopError as error:
            logger.critical("%s: it is not started again", error)
            self.failed_stage = name
        except Exception:
            logger.critical("stage '%s' cannot be started again", name, exc_info=True)
            client.detach("its engine cannot be started again")
            self.failed_stage = name

    async def _clear_up(self, client: AnyStageClient, processes: EngineProcesses, reason: str) -> None:
        """Afterwards nothing of the engine is left: no request, no process, no block of a queue."""
        built = client.detach(reason)
        logger.error("stage '%s' is down: %s", client.name, reason)
        await uninterrupted(self._end(client.name, built, processes))  # not half of it

    async def _end(
        self, name: str, built: BuiltEngine[StageAsyncLLM] | BuiltEngine[AsyncLLM] | None, processes: EngineProcesses
    ) -> None:
        processes.kill()
        if not await asyncio.to_thread(processes.wait, KILL_TIMEOUT_S):
            raise RuntimeError(f"processes of stage '{name}' do not end after SIGKILL")
        if built is not None:
            closing = asyncio.create_task(close_frontend(built.client))
            await asyncio.wait([closing], timeout=FRONTEND_TIMEOUT_S)
            if closing.done():
                await closing
            else:
                logger.warning("stage '%s': threads of its dead engine still work in the server", name)
        processes.remove_leftovers()
        num_blocks = self._engines.end_blocks_of(name)
        logger.debug("stage '%s': %d blocks of its queues were ended in its place", name, num_blocks)

    async def _restart(self, name: str) -> None:
        """Tries again and again. Raises `CrashLoopError`."""
        restarts = self._restarts[name]
        while True:
            await asyncio.sleep(restarts.next_delay_s())
            try:
                with StartProgress(functools.partial(logger.debug, "restart: %s")) as progress:
                    self._engines.attach(name, await self._launcher.build(name, progress))
                return
            except ConfigError as error:
                logger.error("a restart has failed: %s", error)
