"""A stage is a set of identical engines, its replicas. A handle is the server's end of one engine.

A request is bound to a handle of each stage when it first needs the stage, and uses it for all of its calls,
because an engine keeps the request's state. Health, restarts and counters also belong to a handle.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Generic, TypeVar

from omni_server.engine.async_engine import StageAsyncLLM, close_frontend, stage_errors, wake
from omni_server.engine.cancellation import in_daemon_thread, uninterrupted
from omni_server.engine.construction import BuiltEngine
from omni_server.engine.engine_processes import KILL_TIMEOUT_S, EngineProcesses
from omni_server.engine.start_progress import StartProgress
from omni_server.errors import StageDeadError
from omni_server.metrics.replica_name import split_replica_name

logger = logging.getLogger(__name__)

HandleT = TypeVar("HandleT", bound="EngineHandle")
HandleT_co = TypeVar("HandleT_co", bound="EngineHandle", covariant=True)

BuildEngine = Callable[[StartProgress], Awaitable[BuiltEngine]]
"""Returns an engine that is ready. Raises `ConfigError`."""

SHUTDOWN_TIMEOUT_S = 3.0
"""Time for an engine to end by itself. Nothing of it is needed any more, so it is then killed."""

WAKE_INTERVAL_S = 0.5


class Stage(Generic[HandleT_co]):
    """The engines of one stage."""

    def __init__(self, name: str, handles: Sequence[HandleT_co]) -> None:
        """`handles` must not be empty."""
        self.name = name
        self.handles = tuple(handles)
        self._next = 0

    @property
    def is_down(self) -> bool:
        """Whether no engine can accept a request."""
        return all(handle.is_dead for handle in self.handles)

    def choose(self, wanted: "EngineHandle | None" = None) -> HandleT_co:
        """Binds a new request to an engine: to `wanted` if it belongs to the stage, otherwise, of those that
        are up, to the one with the fewest requests; equal ones take turns. An engine that is being replaced
        is chosen only if no other one is up. While the stage is down, returns one whose calls raise
        `StageDeadError`.

        The caller must call `EngineHandle.leave` when the request no longer needs the engine.
        """
        in_turn = self.handles[self._next :] + self.handles[: self._next]
        up = [handle for handle in in_turn if not handle.is_dead]
        routed = [handle for handle in up if not handle.is_draining]
        asked = [handle for handle in self.handles if handle is wanted]
        chosen = min(asked or routed or up or in_turn, key=lambda handle: handle.num_requests)
        self._next = (self.handles.index(chosen) + 1) % len(self.handles)
        chosen.num_requests += 1
        return chosen

    @property
    def any_engine(self) -> HandleT_co:
        """An engine that answers what each replica would answer alike: one that is up, if there is one."""
        return next((handle for handle in self.handles if not handle.is_dead), self.handles[0])


class EngineHandle:
    """One engine, which is replaced if it dies: `start`, and another `start` after each `kill`.

    The calls of a request depend on the kind of stage: `ArHandle.open` and `feed`, or
    `DiffusionHandle.run`.
    """

    def __init__(self, name: str, build: BuildEngine) -> None:
        """`name` is one of `omni_server.metrics.replica_name`."""
        self.name = name
        """Name in errors, logs and metrics."""
        self.stage, number = split_replica_name(name)
        """Name of the stage."""
        self.number = int(number or 0)
        """Of the replica."""
        self.num_requests = 0
        """Requests that are bound to the engine."""
        self.is_draining = False
        """Whether the engine is about to be replaced and should get no new requests."""
        self.life = EngineLife(name)
        self._build = build
        self._built: BuiltEngine | None = None

    def leave(self) -> None:
        """Ends the binding of a request by `Stage.choose`."""
        self.num_requests -= 1

    async def start(self, progress: StartProgress) -> None:
        """Builds the first engine, or the successor of one that was killed. Raises `ConfigError`."""
        self.attach(await self._build(progress))

    def attach(self, built: BuiltEngine) -> None:
        """Makes `built` the current engine."""
        self._built = built
        self.life.came_up()

    def detach(self, reason: str) -> BuiltEngine | None:
        """Marks the engine as down: every request that needs it fails immediately with a `StageDeadError`
        that gives `reason`. Returns the engine, which the caller must end, or None if there is none."""
        built, self._built = self._built, None
        self.life.went_down(reason)
        return built

    async def kill(self, reason: str) -> None:
        """Detaches the engine and ends it without its help. Afterwards nothing of it is left: no request, no
        process, no block of a queue. Runs to completion even if cancelled.

        Raises `RuntimeError` if its processes do not end.
        """
        built = self.detach(reason)
        if built is not None:
            await uninterrupted(self._end(built))

    async def _end(self, built: BuiltEngine) -> None:
        processes = built.processes
        await in_daemon_thread(processes.kill)
        has_ended = await in_daemon_thread(partial(processes.wait, KILL_TIMEOUT_S))
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
        """Ends the blocks that a dead engine has left in the queues. Returns their number."""
        return 0

    @property
    def engine(self) -> StageAsyncLLM:
        """vLLM's client. Raises `StageDeadError` while the engine is down and after `shutdown`."""
        if self._built is None:
            self.life.check()
            raise StageDeadError(self.name, "it has been shut down")
        return self._built.client

    @property
    def processes(self) -> EngineProcesses:
        """The engine's processes. Raises `StageDeadError` while it is down and after `shutdown`."""
        if self._built is None:
            raise StageDeadError(self.name, "it has no process")
        return self._built.processes

    @property
    def is_dead(self) -> bool:
        """Whether the engine is down, has been shut down, or has died by itself."""
        return self._built is None or self._built.client.errored or self._built.processes.has_ended

    @property
    def why_dead(self) -> str:
        """Why the engine is down. Has no meaning while it is up."""
        if self._built is None:
            return self.life.reason or "it has been shut down"
        return self._built.processes.why_ended()

    @property
    def num_active(self) -> int:
        """Unfinished requests of the engine; 0 while it is down."""
        return 0 if self._built is None else self._built.client.output_processor.get_num_unfinished_requests()

    @property
    def pid(self) -> int | None:
        """Process id of the engine's core; None while the engine is down."""
        return None if self._built is None else self._built.processes.core_pid

    async def check_health(self) -> None:
        """Returns when the engine's main loop, between two steps, and all of its workers have answered.

        Raises `StageDeadError`, or the error that a worker reports. May wait forever: a dead or hanging
        engine does not answer.
        """
        with stage_errors(self.name):
            await self.engine.collective_rpc("check_health")

    async def shutdown(self) -> None:
        """Ends the engine's processes gracefully. Harmless if they have already ended."""
        if self._built is None:
            return
        # Drop the object too: its finaliser fails when it runs at interpreter exit.
        built = self.detach("it has been shut down")
        assert built is not None
        if built.client.output_handler is not None:
            # It would report the end of the process as a failure.
            built.client.output_handler.cancel()
        built.processes.terminate()
        ending = asyncio.create_task(in_daemon_thread(partial(built.processes.wait, SHUTDOWN_TIMEOUT_S)))
        while not ending.done():
            await asyncio.wait([ending], timeout=WAKE_INTERVAL_S)
            if not ending.done():
                await wake(built.client, WAKE_INTERVAL_S)
        try:
            await self._end(built)
        except RuntimeError as error:
            logger.warning("%s", error)


class EngineLife:
    """Tracks whether an engine is up, and interrupts the requests that need it when it is not. Belongs to one
    event loop.

    A request may wait for an engine in many ways: for a token, for rows, for a place in the schedule, for
    a thread that renders its prompt. None of these needs to handle dead engines: they all run inside
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
        """Interrupts the block and raises `StageDeadError` when the engine goes down, or immediately if it is
        already down."""
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
        """Raises `StageDeadError` while the engine is down, a new instance for each caller."""
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
