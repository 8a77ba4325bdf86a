"""A stage is a set of engines that compute the same, one today; a handle is the server's end of one engine.

A request chooses a handle of each stage when it begins, and all of its calls go to that one: an engine keeps
what belongs to a request. Health, restarts and counters belong to a handle, too.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from vllm.v1.engine.async_llm import AsyncLLM

from omni_server.engine.async_engine import close_frontend, stage_errors, wake
from omni_server.engine.cancellation import uninterrupted
from omni_server.engine.construction import BuiltEngine
from omni_server.engine.engine_processes import KILL_TIMEOUT_S, EngineProcesses
from omni_server.engine.start_progress import StartProgress
from omni_server.errors import StageDeadError

logger = logging.getLogger(__name__)

EngineT = TypeVar("EngineT", bound=AsyncLLM)
HandleT_co = TypeVar("HandleT_co", bound="EngineHandle[Any]", covariant=True)

BuildEngine = Callable[[StartProgress], Awaitable[BuiltEngine[EngineT]]]
"""Returns an engine that is ready. Raises `ConfigError`."""

SHUTDOWN_TIMEOUT_S = 3.0
"""For an engine to end by itself. Nothing of it is needed any more: then it is killed."""

WAKE_INTERVAL_S = 0.5


class Stage(Generic[HandleT_co]):
    """The engines of one stage."""

    def __init__(self, name: str, handles: Sequence[HandleT_co]) -> None:
        """`handles` is not empty."""
        self.name = name
        self.handles = tuple(handles)

    @property
    def is_down(self) -> bool:
        """No engine can take a request."""
        return all(handle.is_dead for handle in self.handles)

    def choose(self) -> HandleT_co:
        """The engine for a new request: of those that are up, the one with the fewest requests. While the
        stage is down, one that is down: its calls raise `StageDeadError`."""
        up = [handle for handle in self.handles if not handle.is_dead]
        return min(up or self.handles, key=lambda handle: handle.num_active)


class EngineHandle(Generic[EngineT]):
    """One engine, which is replaced if it dies: `start`, and after each `kill` another `start`.

    What a request asks of it depends on the kind of stage: `ArHandle.open` and `feed`, or
    `DiffusionHandle.run`.
    """

    def __init__(self, name: str, build: BuildEngine[EngineT]) -> None:
        self.name = name
        """In errors, logs and metrics: that of the stage, which has one engine."""
        self.life = EngineLife(name)
        self._build = build
        self._built: BuiltEngine[EngineT] | None = None

    async def start(self, progress: StartProgress) -> None:
        """Build an engine, the first one or the successor of one that was killed. Raises `ConfigError`."""
        self.attach(await self._build(progress))

    def attach(self, built: BuiltEngine[EngineT]) -> None:
        """`built` is the engine from now on."""
        self._built = built
        self.life.came_up()

    def detach(self, reason: str) -> BuiltEngine[EngineT] | None:
        """The engine is down: every request that needs it fails at once with a `StageDeadError` that says
        `reason`. Returns the engine, which the caller has to end; None if there is none."""
        built, self._built = self._built, None
        self.life.went_down(reason)
        return built

    async def kill(self, reason: str) -> None:
        """`detach`, and end the engine without its help. Afterwards nothing of it is left: no request, no
        process, no block of a queue. Is done to its end if it is cancelled.

        Raises `RuntimeError` if its processes do not end.
        """
        built = self.detach(reason)
        if built is not None:
            await uninterrupted(self._end(built))

    async def _end(self, built: BuiltEngine[EngineT]) -> None:
        processes = built.processes
        processes.kill()
        has_ended = await asyncio.to_thread(processes.wait, KILL_TIMEOUT_S)
        if not await close_frontend(built.client):
            logger.warning("stage '%s': threads of its dead engine still work in the server", self.name)
        if not has_ended:
            raise RuntimeError(f"processes of stage '{self.name}' do not end after SIGKILL")
        processes.remove_leftovers()
        logger.debug(
            "stage '%s': %d blocks of its queues were ended in its place", self.name, self.end_blocks()
        )
        processes.close()

    def end_blocks(self) -> int:
        """End what an engine that is gone has left in the queues; returns how many blocks that were."""
        return 0

    @property
    def engine(self) -> EngineT:
        """vLLM's client of it. Raises `StageDeadError` while the engine is down, and after `shutdown`."""
        if self._built is None:
            self.life.check()
            raise StageDeadError(self.name, "it has been shut down")
        return self._built.client

    @property
    def processes(self) -> EngineProcesses:
        """Raises `StageDeadError` while the engine is down, and after `shutdown`."""
        if self._built is None:
            raise StageDeadError(self.name, "it has no process")
        return self._built.processes

    @property
    def is_dead(self) -> bool:
        """True while the engine is down, after `shutdown`, and when its process has died by itself."""
        return self._built is None or self._built.client.errored or self._built.processes.has_ended

    @property
    def num_active(self) -> int:
        """Requests that the engine has not finished; 0 while it is down."""
        return 0 if self._built is None else self._built.client.output_processor.get_num_unfinished_requests()

    @property
    def pid(self) -> int | None:
        """Process id of the engine's core; None while the engine is down."""
        return None if self._built is None else self._built.processes.core_pid

    async def check_health(self) -> None:
        """Returns when the engine's main loop, between two steps, and all of its workers have answered.

        Raises `StageDeadError`, or whatever a worker finds wrong with itself. May wait forever: a dead or
        hanging engine does not answer.
        """
        with stage_errors(self.name):
            await self.engine.collective_rpc("check_health")

    async def shutdown(self) -> None:
        """End the engine's processes in good order. Harmless when they have ended already."""
        if self._built is None:
            return
        # The object goes too: its finaliser fails when it runs at interpreter exit.
        built, self._built = self._built, None
        if built.client.output_handler is not None:
            # It would report the end of the process as a failure.
            built.client.output_handler.cancel()
        built.processes.terminate()
        ending = asyncio.create_task(asyncio.to_thread(built.processes.wait, SHUTDOWN_TIMEOUT_S))
        while not ending.done():
            await asyncio.wait([ending], timeout=WAKE_INTERVAL_S)
            if not ending.done():
                await wake(built.client, WAKE_INTERVAL_S)
        try:
            await self._end(built)
        except RuntimeError as error:
            logger.warning("%s", error)


class EngineLife:
    """Whether an engine is up, and how the requests that need it learn that it is not. Belongs to one event
    loop.

    A request may wait for an engine in many ways: for a token, for rows, for a place in the schedule, for a
    thread that renders its prompt. None of these has to know about engines that die: they all happen inside
    `needed`.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self.reason: str | None = None
        """Why the engine is down; None while it is up."""
        self._last_reason = ""
        self._inside: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def needed(self) -> AsyncIterator[None]:
        """When the engine goes down, the block is interrupted and raises `StageDeadError`. If the engine is
        down at its beginning, it raises at once."""
        self.check()
        end = asyncio.timeout(None)  # its deadline is the end of the engine
        try:
            async with end:
                self._inside.add(end)
                yield
        except TimeoutError:
            if not end.expired():
                raise
            raise StageDeadError(self._stage, self._last_reason) from None
        finally:
            self._inside.discard(end)

    def check(self) -> None:
        """Raises `StageDeadError` while the engine is down, to each caller one of its own."""
        if self.reason is not None:
            raise StageDeadError(self._stage, self.reason)

    def went_down(self, reason: str) -> None:
        """Interrupts all requests that need the engine."""
        self.reason = self._last_reason = reason
        inside, self._inside = self._inside, set()
        for end in inside:
            end.reschedule(asyncio.get_running_loop().time())

    def came_up(self) -> None:
        self.reason = None
