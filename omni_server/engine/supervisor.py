"""Keeps the engines up: when an engine dies or hangs, removes its leftovers and starts another one. Replaces
an engine on request."""

import asyncio
import errno
import functools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import zmq

from omni_server.config.stage_config import SupervisionConfig
from omni_server.engine.async_engine import silence_death_reports
from omni_server.engine.cancellation import cancel_and_wait, uninterrupted
from omni_server.engine.engine_handle import EngineHandle, Stage
from omni_server.engine.start_progress import StartProgress
from omni_server.errors import ConfigError, OmniError, ReplacementError, StageDeadError, StageDownError

logger = logging.getLogger(__name__)

WarmUp = Callable[[EngineHandle], Awaitable[None]]
"""Sends requests through an engine. Raises `OmniError`."""

FIRST_BACKOFF_S = 0.5
"""Delay before the second restart; the first one is immediate."""

LACK_BACKOFF_S = 5.0
"""Delay after a restart for which the machine lacked something."""
_LACKS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
"""No file descriptor, no memory, no process."""

POLL_S = 0.05
"""Interval between checks for a dead engine, which cost next to nothing."""
HEALTH_INTERVAL_S = 2.0
"""From the answer to one health check to the next check."""
_LONGEST_TICK_S = 1.0
"""At most this much of the time between two checks counts as the engine's silence: this process itself may
have been stopped."""


class Supervisor:
    """Watches every engine from `start` to `stop`. Belongs to one event loop."""

    def __init__(
        self, stages: Iterable[Stage[EngineHandle]], policy: SupervisionConfig, warm_up: WarmUp
    ) -> None:
        self._stages = tuple(stages)
        self._policy = policy
        self._warm_up = warm_up
        self._restarts = {handle.name: Restarts(handle.name, policy) for handle in self._handles()}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._failed: set[str] = set()

    def _handles(self) -> Iterator[EngineHandle]:
        for stage in self._stages:
            yield from stage.handles

    def start(self) -> None:
        """Starts watching. Must be called when all engines are up."""
        silence_death_reports()
        for handle in self._handles():
            logger.info("stage '%s' runs in process %d", handle.name, handle.pid)
            self._watch(handle)

    def _watch(self, handle: EngineHandle) -> None:
        task = asyncio.create_task(self._supervise(handle), name=f"watch {handle.name}")
        self._watches[handle.name] = task

    @property
    def failed_stage(self) -> str | None:
        """A stage of which all engines have failed. If it is set, the server must end."""
        for stage in self._stages:
            if all(handle.name in self._failed for handle in stage.handles):
                return stage.name
        return None

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the engines that died too often. Others serve; these are down until the policy allows
        another restart."""
        return tuple(handle.name for handle in self._handles() if handle.name in self._failed)

    @property
    def num_restarts(self) -> Mapping[str, int]:
        """Restarts that were begun, successful or not, by the handle's name."""
        return {name: restarts.count for name, restarts in self._restarts.items()}

    async def stop(self) -> None:
        """Stops watching, and gives up an engine that is being built. Takes no longer than cleaning up after
        a dead engine. Harmless if not started."""
        await cancel_and_wait(*self._watches.values())

    async def replace(self, name: str, timeout_s: float) -> int:
        """Replaces the engine with this name by a new one, without an error for any request: new requests go
        to other replicas, and those of the engine may finish. An engine that has failed is started, too.
        Returns the process id of the new engine.

        Raises `ReplacementError`; unless the message says otherwise, the engine serves on.
        """
        stage, handle = self._find(name)
        if not self._has_others(stage, handle):
            raise ReplacementError(
                f"stage '{stage.name}' has no other replica that is up, which could take over its requests"
            )
        if handle.is_draining:
            raise ReplacementError(f"'{name}' is being replaced already")
        handle.is_draining = True
        try:
            await _drained(handle, timeout_s)
            return await self._exchange(handle)
        finally:
            handle.is_draining = False

    @staticmethod
    def _has_others(stage: Stage[EngineHandle], handle: EngineHandle) -> bool:
        """Whether another engine of the stage takes requests."""
        others = (other for other in stage.handles if other is not handle)
        return any(not other.is_dead and not other.is_draining for other in others)

    def _find(self, name: str) -> tuple[Stage[EngineHandle], EngineHandle]:
        for stage in self._stages:
            for handle in stage.handles:
                if handle.name == name:
                    return stage, handle
        names = ", ".join(handle.name for handle in self._handles())
        raise ReplacementError(f"there is no replica '{name}'; replicas are {names}")

    async def _exchange(self, handle: EngineHandle) -> int:
        """Ends the engine, which has no request, and starts another one."""
        name, began = handle.name, time.monotonic()
        await cancel_and_wait(self._watches[name])
        try:
            logger.info("stage '%s' is replaced", name)
            await uninterrupted(handle.shutdown())
            with StartProgress(functools.partial(logger.debug, "replacement: %s")) as progress:
                await handle.start(progress)
            self._failed.discard(name)
            self._restarts[name].recent.clear()
            await self._warm(handle)
        except (ConfigError, OmniError) as error:
            # Whether it did not start or did not answer: the next attempts are those of a restart.
            await handle.kill(str(error))
            raise ReplacementError(
                f"the new engine of '{name}' has failed, and is restarted: {error}"
            ) from error
        finally:
            self._watch(handle)
        pid, took_s = handle.processes.core_pid, time.monotonic() - began
        logger.info("stage '%s' runs again, after %.1f s, in process %d", name, took_s, pid)
        return pid

    async def _supervise(self, handle: EngineHandle) -> None:
        name = handle.name
        try:
            while True:
                reason = await until_down(handle, self._policy.hang_timeout_s)
                began = time.monotonic()
                logger.error("stage '%s' is down: %s", name, reason)
                await handle.kill(reason)
                await self._restart(handle)
                took_s = time.monotonic() - began
                logger.info("stage '%s' runs again, after %.1f s, in process %d", name, took_s, handle.pid)
        except CrashLoopError as error:
            logger.critical("%s: it is not started again", error)
        except Exception:
            logger.critical("stage '%s' cannot be started again", name, exc_info=True)
            handle.detach("its engine cannot be started again")
            self._failed.add(name)

    async def _restart(self, handle: EngineHandle) -> None:
        """Retries until an engine is up. While other replicas serve, it is warmed up before it gets requests.
        Raises `CrashLoopError`."""
        stage, _ = self._find(handle.name)
        while True:
            await self._until_allowed(stage, handle)
            is_draining, handle.is_draining = handle.is_draining, True
            try:
                with StartProgress(functools.partial(logger.debug, "restart: %s")) as progress:
                    await handle.start(progress)
                if self._has_others(stage, handle):
                    await self._warm(handle)
                return
            except (ConfigError, OmniError, OSError) as error:
                logger.error("a restart has failed: %s", error)
                await handle.kill(str(error))
                lacks = lacks_resources(error)
            finally:
                handle.is_draining = is_draining  # it may be waiting for its replacement
            if lacks:
                self._restarts[handle.name].recent.pop()
                await asyncio.sleep(LACK_BACKOFF_S)

    async def _until_allowed(self, stage: Stage[EngineHandle], handle: EngineHandle) -> None:
        """Returns when the policy allows the next restart. Raises `CrashLoopError` if it allows none, or if
        no other engine of the stage serves until then."""
        name, restarts = handle.name, self._restarts[handle.name]
        while True:
            try:
                delay_s = restarts.next_delay_s()
                break
            except CrashLoopError as error:
                was_known = name in self._failed
                self._failed.add(name)
                if error.retry_s is None or self.failed_stage == stage.name:
                    raise
                if not was_known:
                    logger.critical("%s: it is started again in %.0f s", error, error.retry_s)
                await asyncio.sleep(error.retry_s)
        await asyncio.sleep(delay_s)
        self._failed.discard(name)

    async def _warm(self, handle: EngineHandle) -> None:
        """Sends requests through the engine. Raises `OmniError` if it fails."""
        try:
            await self._warm_up(handle)
        except (StageDeadError, StageDownError) as error:
            if error.stage == handle.name:
                raise
            logger.warning("stage '%s' was not warmed up: %s", handle.name, error)


async def _drained(handle: EngineHandle, timeout_s: float) -> None:
    """Returns when no request is bound to the engine. Raises `ReplacementError`."""
    deadline = time.monotonic() + timeout_s
    while handle.num_requests:
        if time.monotonic() >= deadline:
            raise ReplacementError(
                f"'{handle.name}' still has {handle.num_requests} requests after {timeout_s:g} s, and is not "
                "replaced: it gets new requests again"
            )
        await asyncio.sleep(POLL_S)


def lacks_resources(error: BaseException | None) -> bool:
    """Whether an engine could not be started because this process got no file descriptor, memory, process or
    thread, which does not say anything about the engine."""
    while error is not None:
        if isinstance(error, OSError | zmq.ZMQError) and error.errno in _LACKS:
            return True
        if isinstance(error, MemoryError) or "can't start new thread" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


class CrashLoopError(Exception):
    """A stage has died too often; the message says how often."""

    def __init__(self, message: str, retry_s: float | None) -> None:
        """`retry_s`: when the policy allows the next restart, from now; None: never."""
        super().__init__(message)
        self.retry_s = retry_s


@dataclass
class Restarts:
    """Counts the restarts of one stage and decides when the next one may begin."""

    stage: str
    policy: SupervisionConfig
    clock: Callable[[], float] = time.monotonic
    count: int = 0
    """Restarts that were begun, successful or not."""
    recent: deque[float] = field(default_factory=deque)
    """Start times of the restarts within the policy's window."""

    def next_delay_s(self) -> float:
        """Counts a restart and returns the seconds to wait before it. Raises `CrashLoopError` if the policy
        allows no more."""
        policy, now = self.policy, self.clock()
        while self.recent and now - self.recent[0] > policy.restart_window_s:
            self.recent.popleft()
        if len(self.recent) >= policy.max_restarts:
            raise CrashLoopError(
                f"stage '{self.stage}' has died {len(self.recent) + 1} times "
                f"within {policy.restart_window_s:g} s, and supervision.max_restarts is {policy.max_restarts}",
                self.recent[0] + policy.restart_window_s - now if self.recent else None,
            )
        self.recent.append(now)
        self.count += 1
        before = len(self.recent) - 1
        return 0.0 if before == 0 else min(policy.max_backoff_s, FIRST_BACKOFF_S * 2 ** (before - 1))


async def until_down(
    handle: EngineHandle,
    hang_timeout_s: float | None,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Returns the reason once the engine is down: it died, failed, or was silent for `hang_timeout_s`.

    Health checks are answered by the main loop of the engine core, between two steps, and by all of its
    workers. A step that never ends is therefore noticed as well as a stopped process.
    """
    health: asyncio.Task[None] | None = None
    waited_s, last = 0.0, clock()  # for an answer, or since the last one
    try:
        while not handle.is_dead:
            now = clock()
            waited_s += min(now - last, _LONGEST_TICK_S)
            last = now
            if hang_timeout_s is None:
                pass
            elif health is None:
                if waited_s >= HEALTH_INTERVAL_S:
                    health, waited_s = asyncio.create_task(handle.check_health()), 0.0
            elif health.done():
                if (error := health.exception()) is not None:
                    return f"its health check has failed: {error}"
                health, waited_s = None, 0.0
            elif waited_s >= hang_timeout_s:
                return f"its engine has not answered for {hang_timeout_s:g} s"
            await asyncio.sleep(POLL_S)
        return handle.why_dead
    finally:
        if health is not None:
            health.cancel()
            await asyncio.gather(health, return_exceptions=True)
