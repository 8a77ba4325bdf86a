"""What the server's clients of all stages have in common: a name, an engine that may be replaced, a
shutdown."""

import asyncio
import logging
from typing import Generic, TypeVar

from vllm.v1.engine.async_llm import AsyncLLM

from omni_server.engine.async_engine import close_frontend, stage_errors, wake
from omni_server.engine.construction import BuiltEngine
from omni_server.engine.engine_processes import KILL_TIMEOUT_S, EngineProcesses
from omni_server.engine.stage_life import StageLife
from omni_server.errors import StageDeadError

logger = logging.getLogger(__name__)

EngineT = TypeVar("EngineT", bound=AsyncLLM)

SHUTDOWN_TIMEOUT_S = 3.0
"""For an engine to end by itself. Nothing of it is needed any more: then it is killed."""

WAKE_INTERVAL_S = 0.5


class StageClient(Generic[EngineT]):
    """Owns the stage's engine, and outlives it: when one dies, another takes its place."""

    def __init__(self, name: str, built: BuiltEngine[EngineT]) -> None:
        self.name = name
        self.life = StageLife(name)
        self._built: BuiltEngine[EngineT] | None = None
        self.attach(built)

    def attach(self, built: BuiltEngine[EngineT]) -> None:
        """The stage is up, with this engine."""
        self._built = built
        self.life.came_up()

    def detach(self, reason: str) -> BuiltEngine[EngineT] | None:
        """The stage is down: every request that needs it fails at once with a `StageDeadError` that says
        `reason`. Returns the engine, which the caller has to end; None where there is none."""
        built, self._built = self._built, None
        self.life.went_down(reason)
        return built

    @property
    def engine(self) -> EngineT:
        """vLLM's client of it. Raises `StageDeadError` while the stage is down, and after `shutdown`."""
        if self._built is None:
            self.life.check()
            raise StageDeadError(self.name, "it has been shut down")
        return self._built.client

    @property
    def processes(self) -> EngineProcesses:
        """Raises `StageDeadError` while the stage is down, and after `shutdown`."""
        if self._built is None:
            raise StageDeadError(self.name, "it has no process")
        return self._built.processes

    @property
    def is_dead(self) -> bool:
        """True while the stage is down, after `shutdown`, and when the engine process has died by itself."""
        return self._built is None or self._built.client.errored or self._built.processes.has_ended

    @property
    def num_active(self) -> int:
        """Requests that the stage has not finished; 0 while it is down."""
        return 0 if self._built is None else self._built.client.output_processor.get_num_unfinished_requests()

    @property
    def pid(self) -> int | None:
        """Process id of the engine's core; None while the stage is down."""
        return None if self._built is None else self._built.processes.core_pid

    async def check_health(self) -> None:
        """Returns when the engine's main loop, between two steps, and all of its workers have answered.

        Raises `StageDeadError`, or whatever a worker finds wrong with itself. May wait for ever: a dead or
        hanging engine does not answer.
        """
        with stage_errors(self.name):
            await self.engine.collective_rpc("check_health")

    async def shutdown(self) -> None:
        """End the engine's processes. Harmless when they have ended already."""
        if self._built is None:
            return
        # The object goes too: its finaliser fails when it runs at interpreter exit.
        built, self._built = self._built, None
        engine, processes = built.client, built.processes
        if engine.output_handler is not None:
            # It would report the end of the process as a failure.
            engine.output_handler.cancel()
        processes.terminate()
        ending = asyncio.create_task(asyncio.to_thread(processes.wait, SHUTDOWN_TIMEOUT_S))
        while not ending.done():
            await asyncio.wait([ending], timeout=WAKE_INTERVAL_S)
            if not ending.done():
                await wake(engine, WAKE_INTERVAL_S)
        if not await ending:
            processes.kill()
            if not await asyncio.to_thread(processes.wait, KILL_TIMEOUT_S):
                logger.warning("processes of stage '%s' do not end after SIGKILL", self.name)
        processes.remove_leftovers()
        if not await close_frontend(engine):
            logger.warning("stage '%s': vLLM's client of its engine does not close", self.name)
