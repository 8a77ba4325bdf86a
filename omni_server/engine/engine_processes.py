"""The processes of one engine, to be ended without their help."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from omni_server.engine.process_files import remove_shared_files, shared_files_of

logger = logging.getLogger(__name__)

_RESOURCE_TRACKER = "multiprocessing.resource_tracker"
"""Python's process that removes leaked semaphores and shared memory. It ends by itself, after its work."""

_UNKNOWN_EXIT_CODE = 255
"""multiprocessing's exit code of a forked process when the fork server, which would know the real one, has
ended."""

KILL_TIMEOUT_S = 20.0
"""For the processes of an engine to disappear after SIGKILL. One that waits for a device that does not answer
may not."""

_POLL_S = 0.02


class EngineProcesses:
    """vLLM's engine core, a child of this process, and the workers that it has started for several ranks.

    Linux only: it reads /proc.
    """

    def __init__(self, core: BaseProcess) -> None:
        """To be made while the engine runs or starts: the children of a dead process
        cannot be found."""
        self._core = core
        assert core.pid is not None
        self.core_pid = core.pid
        self._started: dict[int, str] = {}
        self._shared_files: frozenset[str] = frozenset()
        self._add([core.pid])
        self.look_again()

    @property
    def has_ended(self) -> bool:
        """Whether the engine core has ended; its workers may still be about to."""
        return not self._core.is_alive()

    def why_ended(self) -> str:
        """The reason as text, for a core that has ended."""
        code = self._core.exitcode
        if code is None:
            return "its engine has failed"
        if code == _UNKNOWN_EXIT_CODE and self.core_pid in self._running():
            return "the process that its engine was forked from has ended"
        if code >= 0:
            return f"its engine process has ended (exit code {code})"
        with suppress(ValueError):
            return f"its engine process was killed ({signal.Signals(-code).name})"
        return f"its engine process was killed (signal {-code})"

    def look_again(self) -> None:
        """Take note of what the core has started and shares by now. When it has died, it is too late to
        look."""
        self._look_for_workers()
        self._look_for_shared_files()

    async def until_ended(self) -> None:
        while not self.has_ended:  # noqa: ASYNC110 - it is looked at elsewhere, too
            await asyncio.sleep(_POLL_S)

    def terminate(self) -> None:
        """SIGTERM to the core, which ends its workers."""
        if not self.has_ended:
            os.kill(self.core_pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to all that still run, which ends stopped ones, too.

        They are stopped and looked at again before, so that nothing is missed of what they have made since:
        an engine that is being built makes most of it late.
        """
        self._send(signal.SIGSTOP)
        self._look_for_workers()
        self._send(signal.SIGSTOP)
        self._look_for_shared_files()
        self._core.kill()  # also where /proc cannot be read: a server without file descriptors left
        self._send(signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Block until all have ended. False if they have not within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self._core.join(timeout_s)
        while self._core.exitcode is None or self._running():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def remove_leftovers(self) -> None:
        """Remove what they had in shared memory beside the queues. All must have ended."""
        remove_shared_files(self._shared_files)

    def close(self) -> None:
        """Let go of the file descriptors by which the core was watched. All must have ended, and no method
        may be called afterwards."""
        self._core.close()

    def _look_for_workers(self) -> None:
        if self.core_pid in self._running():
            self._add(_descendants(self.core_pid))

    def _add(self, pids: Iterable[int]) -> None:
        for pid in pids:
            if (started := _start_time(pid)) and not _is_tracker(pid):
                self._started[pid] = started

    def _look_for_shared_files(self) -> None:
        try:
            self._shared_files |= shared_files_of(self._running()) - shared_files_of([os.getpid()])
        except OSError as error:  # an engine can be ended without that
            logger.warning("it is not known what process %d has in shared memory: %s", self.core_pid, error)

    def _send(self, what: signal.Signals) -> None:
        for pid in self._running():
            with suppress(ProcessLookupError):
                os.kill(pid, what)

    def _running(self) -> list[int]:
        """Process ids of the core and the workers, without zombies. A number that another process has by now
        is told by the time at which that process started."""
        return [pid for pid, started in self._started.items() if _start_time(pid) == started]


def _descendants(pid: int) -> list[int]:
    """Process ids, without `pid` itself."""
    found = [pid]
    for parent in found:
        with suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                with suppress(OSError):
                    found += map(int, (task / "children").read_text().split())
    return found[1:]


def _start_time(pid: int) -> str | None:
    """In ticks since the boot; None for a process that has ended, zombies included."""
    with suppress(OSError):
        # After the name, which may hold anything: fields 3 and 22 of proc(5).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    return None


def _is_tracker(pid: int) -> bool:
    with suppress(OSError):
        return _RESOURCE_TRACKER in Path(f"/proc/{pid}/cmdline").read_text()
    return True
