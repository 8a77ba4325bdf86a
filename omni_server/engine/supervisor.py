"""Keeps the stages up: when an engine dies or hangs, what it leaves is cleared away and another one is
started."""

import asyncio
import functools
import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from omni_server.config.stage_config import SupervisionConfig
from omni_server.engine.async_engine import close_frontend, silence_death_reports
from omni_server.engine.cancellation import uninterrupted
from omni_server.engine.construction import AnyBuiltEngine
from omni_server.engine.engine_processes import KILL_TIMEOUT_S, EngineProcesses
from omni_server.engine.launcher import AnyStageClient, Engines
from omni_server.engine.stage_client import StageClient
from omni_server.engine.stage_launcher import StageLauncher
from omni_server.engine.start_progress import StartProgress
from omni_server.errors import ConfigError

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.5
"""Before the second restart; the first one comes at once."""

POLL_S = 0.05
"""Between two looks at whether the engine has died, which cost next to nothing."""
HEALTH_INTERVAL_S = 2.0
"""Between the answer to one health check and the next check."""
_LONGEST_TICK_S = 1.0
"""No more than this between two looks counts as the engine's silence: this process itself may have been
stopped."""


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
        """To be called when all stages are up."""
        silence_death_reports()
        for client in self._engines.clients():
            logger.info("stage '%s' runs in process %d", client.name, client.processes.core_pid)
            self._tasks.append(asyncio.create_task(self._supervise(client), name=f"watch {client.name}"))

    @property
    def num_restarts(self) -> Mapping[str, int]:
        """By stage, the restarts that were begun, successful or not."""
        return {name: restarts.count for name, restarts in self._restarts.items()}

    async def stop(self) -> None:
        """Stop watching, and give up an engine that is being built. Takes no longer than to clear up after a
        dead engine. Harmless if not started."""
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
                # vLLM's renderer of the dead engine is a reference cycle, and holds a tokenizer. It takes 13
                # to 21 ms, once 81, on busy cores.
                gc.collect()
                took_s = time.monotonic() - began
                logger.info(
                    "stage '%s' runs again, after %.1f s, in process %d", name, took_s, processes.core_pid
                )
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

    async def _end(self, name: str, built: AnyBuiltEngine | None, processes: EngineProcesses) -> None:
        processes.kill()
        if not await asyncio.to_thread(processes.wait, KILL_TIMEOUT_S):
            raise RuntimeError(f"processes of stage '{name}' do not end after SIGKILL")
        if built is not None and not await close_frontend(built.client):
            logger.warning("stage '%s': threads of its dead engine still work in the server", name)
        processes.remove_leftovers()
        num_blocks = self._engines.end_blocks_of(name)
        logger.debug("stage '%s': %d blocks of its queues were ended in its place", name, num_blocks)

    async def _restart(self, name: str) -> None:
        """Tries until an engine is up. Raises `CrashLoopError`."""
        restarts = self._restarts[name]
        while True:
            await asyncio.sleep(restarts.next_delay_s())
            try:
                with StartProgress(functools.partial(logger.debug, "restart: %s")) as progress:
                    self._engines.attach(name, await self._launcher.build(name, progress))
                return
            except ConfigError as error:
                logger.error("a restart has failed: %s", error)


class CrashLoopError(Exception):
    """A stage has died too often; the message says how often."""


class Restarts:
    """Counts the restarts of one stage, and says when the next one may begin."""

    def __init__(
        self, stage: str, policy: SupervisionConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stage = stage
        self._policy = policy
        self._clock = clock
        self._recent: deque[float] = deque()
        self.count = 0
        """Restarts that were begun, successful or not."""

    def next_delay_s(self) -> float:
        """Count a restart, and return the seconds to wait before it. Raises `CrashLoopError` if the policy
        allows no more."""
        policy, now = self._policy, self._clock()
        while self._recent and now - self._recent[0] > policy.restart_window_s:
            self._recent.popleft()
        if len(self._recent) >= policy.max_restarts:
            raise CrashLoopError(
                f"stage '{self._stage}' has died {len(self._recent) + 1} times "
                f"within {policy.restart_window_s:g} s, and supervision.max_restarts is {policy.max_restarts}"
            )
        self._recent.append(now)
        self.count += 1
        before = len(self._recent) - 1
        return 0.0 if before == 0 else min(policy.max_backoff_s, FIRST_BACKOFF_S * 2 ** (before - 1))


async def until_down(
    client: StageClient[Any],
    processes: EngineProcesses,
    hang_timeout_s: float | None,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Returns, in words, how the engine went down: it died, failed, or did not answer for `hang_timeout_s`.

    Health checks are answered by the main loop of the engine core, between two steps, and by all of its
    workers. So a step that never ends is noticed as well as a process that is stopped.
    """
    health: asyncio.Task[None] | None = None
    silent_s = 0.0
    rested_s = 0.0
    last = clock()
    try:
        while True:
            if processes.has_ended or client.is_dead:
                return processes.why_ended()
            now = clock()
            tick_s, last = min(now - last, _LONGEST_TICK_S), now
            if health is None:
                rested_s += tick_s
                if hang_timeout_s is not None and rested_s >= HEALTH_INTERVAL_S:
                    health, silent_s = asyncio.create_task(client.check_health()), 0.0
            elif health.done():
                if (error := health.exception()) is not None and not client.is_dead:
                    return f"its health check has failed: {error}"
                health, rested_s = None, 0.0
            else:
                silent_s += tick_s
                if hang_timeout_s is not None and silent_s >= hang_timeout_s:
                    return f"its engine has not answered for {hang_timeout_s:g} s"
            await asyncio.sleep(POLL_S)
    finally:
        if health is not None:
            health.cancel()
            await asyncio.wait([health])
            if not health.cancelled():
                health.exception()  # asyncio would complain that nobody asked for it
