"""The processes of one engine, which can be ended without their help."""

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
"""Python's process that removes leaked semaphores and shared memory. It ends by itself when it is done."""

_UNKNOWN_EXIT_CODE = 255
"""multiprocessing's exit code of a forked process if the fork server, which would know the real one, has
ended."""

KILL_TIMEOUT_S = 20.0
"""Time for an engine's processes to disappear after SIGKILL. A process that waits for an unresponsive device
may not."""

_POLL_S = 0.02


class EngineProcesses:
    """vLLM's engine core, a child of this process, and the workers that it has started for several ranks.

    Linux only: reads /proc.
    """

    def __init__(self, core: BaseProcess) -> None:
        """Must be created while the engine runs or starts: the children of a dead process cannot be found."""
        self._core = core
        assert core.pid is not None
        self.core_pid = core.pid
        self._started: dict[int, str] = {}
        self._shared_files: frozenset[str] = frozenset()
        self._add([core.pid])
        self.look_again()

    @property
    def has_ended(self) -> bool:
        """Whether the engine core has ended. Its workers may still be ending."""
        return not self._core.is_alive()

    def why_ended(self) -> str:
        """Returns the reason as text, for a core that has ended."""
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
        """Records what the core has started and shares by now. After its death it is too late to look."""
        self._look_for_workers()
        self._look_for_shared_files()

    async def until_ended(self) -> None:
        while not self.has_ended:  # noqa: ASYNC110 - it is looked at elsewhere, too
            await asyncio.sleep(_POLL_S)

    def terminate(self) -> None:
        """Sends SIGTERM to the core, which ends its workers."""
        if not self.has_ended:
            os.kill(self.core_pid, signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL to all running processes, which also ends stopped ones.

        Stops them and looks again first, so that nothing that they have created since is missed: an engine
        under construction creates most of it late.
        """
        self._send(signal.SIGSTOP)
        self._look_for_workers()
        self._send(signal.SIGSTOP)
        self._look_for_shared_files()
        self._core.kill()  # even if /proc cannot be read: a server without file descriptors left
        self._send(signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Blocks until all processes have ended. Returns False if they have not within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self._core.join(timeout_s)
        while self._core.exitcode is None or self._running():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def remove_leftovers(self) -> None:
        """Removes their shared memory other than the queues. All processes must have ended."""
        remove_shared_files(self._shared_files)

    def close(self) -> None:
        """Closes the file descriptors that the core was watched through. All processes must have ended, and
        no method may be called afterwards."""
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
        """Returns the process ids of the core and the workers, without zombies. A process that has reused an
        id has another start time."""
        return [pid for pid, started in self._started.items() if _start_time(pid) == started]


def _descendants(pid: int) -> list[int]:
    """Returns the process ids, without `pid` itself."""
    found = [pid]
    for parent in found:
        with suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                with suppress(OSError):
                    found += map(int, (task / "children").read_text().split())
    return found[1:]


def _start_time(pid: int) -> str | None:
    """Returns ticks since boot, or None for a process that has ended, including zombies."""
    with suppress(OSError):
        # Fields 3 and 22 of proc(5), after the name, which may contain anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    return None


def _is_tracker(pid: int) -> bool:
    with suppress(OSError):
        return _RESOURCE_TRACKER in Path(f"/proc/{pid}/cmdline").read_text()
    return True
