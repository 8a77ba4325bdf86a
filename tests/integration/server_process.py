"""The server as a user starts it: a process of its own, found through HTTP and `/proc` only."""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

import httpx2

from tests.integration.forked_server import ForkedServer
from tests.omni_families import QWEN2_5_OMNI

ROOT = Path(__file__).resolve().parents[2]
MODEL = "omni"
READY_TIMEOUT_S = 600.0
END_TIMEOUT_S = 120.0

_SHARED_MEMORY = Path("/dev/shm")
_ENGINE_TITLE = "VLLM::EngineCore"
_SET_BY_TEST_RUNS = ("OMP_NUM_THREADS", "HF_HUB_OFFLINE")


class ServerProcess:
    """Started by the constructor, which returns when `/ready` is 200. A `with` block ends with SIGTERM, which
    must end it cleanly."""

    def __init__(
        self,
        checkpoint: Path | None,
        log: Path,
        *flags: str,
        stdout: Path | None = None,
        is_forked: bool = True,
        has_queue: bool = True,
        stage_config: str | None = QWEN2_5_OMNI.stage_config,
    ) -> None:
        """`checkpoint`: None serves the speaking demo. `stdout`: where its standard output goes, if not to
        the log. Without `is_forked` it is a new interpreter, which imports all by itself. `has_queue`:
        embeddings flow from one stage to another."""
        self._log = log
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.unready_statuses: set[tuple[int, str]] = set()
        """Status and error code of every answer of `/ready` before the first 200."""
        self.health_while_loading: set[tuple[int, str]] = set()
        """The same of `/health`, asked just before."""
        arguments = ["serve", *([] if checkpoint is None else [str(checkpoint)])]
        arguments += [] if stage_config is None else ["--stage-config", stage_config]
        arguments += ["--port", str(port), "--served-model-name", MODEL, *flags]
        environment = {name: value for name, value in os.environ.items() if name not in _SET_BY_TEST_RUNS}
        log.write_bytes(b"")
        self.process = self._start(arguments, environment, stdout or log, is_forked=is_forked)
        try:
            self._wait_until_ready()
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        self._shared_files = set(self.shared_files())
        assert any(name.startswith("omni-server-") for name in self._shared_files) == has_queue

    def _start(
        self, arguments: list[str], environment: dict[str, str], stdout: Path, *, is_forked: bool
    ) -> "subprocess.Popen[bytes] | ForkedServer":
        if is_forked:
            return ForkedServer(arguments, cwd=ROOT, environment=environment, stdout=stdout, stderr=self._log)
        command = [sys.executable, "-m", "omni_server.cli.entry", *arguments]
        with self._log.open("ab") as errors, stdout.open("ab") as output:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        exit_code = self.terminate()
        if kind is None:
            assert exit_code == 0, self.log
            self.wait_until_nothing_is_left()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=300)

    def engine_pids(self) -> list[int]:
        titles = {pid: command_line(pid) for pid in self.process_tree()}
        return [pid for pid, title in titles.items() if title.startswith(_ENGINE_TITLE)]

    def process_tree(self) -> list[int]:
        """The server and all its descendants."""
        children: dict[int, list[int]] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            stat = _stat(int(folder.name))
            if stat is not None:
                children.setdefault(int(stat[1]), []).append(int(folder.name))
        tree = [self.process.pid]
        for pid in tree:
            tree += children.get(pid, [])
        return tree

    def memory_bytes(self) -> int:
        """Proportional set size of all processes: pages that several map are counted once."""
        rollups = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in self.process_tree()]
        sizes = [re.search(r"^Pss:\s+(\d+) kB$", rollup, re.MULTILINE) for rollup in rollups]
        assert all(sizes)
        return sum(1024 * int(size[1]) for size in sizes if size is not None)

    def shared_files(self) -> dict[str, int]:
        """Those in shared memory that this server and its engines use, by name, with the bytes that are not
        reserved yet. Other programs' come and go."""
        inodes = self.shared_inodes()
        files: dict[str, int] = {}
        for entry in os.scandir(_SHARED_MEMORY):
            if entry.inode() in inodes:
                with suppress(FileNotFoundError):  # it has just been removed
                    stat = entry.stat()
                    files[entry.name] = max(0, stat.st_size - 512 * stat.st_blocks)
        return files

    def shared_inodes(self) -> set[int]:
        """A mapped semaphore has another name in /proc than in the folder: the inode is what they share."""
        inodes: set[int] = set()
        for pid in self.process_tree():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                maps = Path(f"/proc/{pid}/maps").read_text()
                inodes.update(int(inode) for inode in re.findall(rf" (\d+) +{_SHARED_MEMORY}/", maps))
        return inodes

    def wait_until_idle(self) -> None:
        """Returns when a second has passed in which no engine did any work."""
        ticks = self._engine_ticks()

        def is_idle() -> bool:
            nonlocal ticks
            time.sleep(1)
            before, ticks = ticks, self._engine_ticks()
            return abs(ticks - before) < 5  # hundredths of a second; with each thread's rounded by itself

        wait_until(is_idle, 60)

    def terminate(self) -> int:
        """The exit code after SIGTERM."""
        self._shared_files |= self.shared_files().keys()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_TIMEOUT_S)

    def wait_until_nothing_is_left(self) -> None:
        """Returns when all that the server and its engines had in shared memory, semaphores included, is
        gone.

        Python's resource tracker ends a moment after its parent. What other programs have there does not
        matter.
        """
        wait_until(lambda: not self._left_behind(), 20, lambda: f"left in /dev/shm: {self._left_behind()}")

    def _left_behind(self) -> set[str]:
        return self._shared_files & {path.name for path in _SHARED_MEMORY.iterdir()}

    def _engine_ticks(self) -> int:
        """Processor time of the engines.

        Gloo's threads are left out: there are 18 an engine, and each looks around 100 times a second, work or
        none.
        """
        return sum(_ticks(pid) for pid in self.engine_pids())

    def _wait_until_ready(self) -> None:
        with httpx2.Client(base_url=self.url) as client:

            def is_ready() -> bool:
                assert self.process.poll() is None, f"the server ended by itself:\n{self.log}"
                try:
                    health, response = client.get("/health"), client.get("/ready")
                except httpx2.TransportError:  # not listening yet, or busy with its imports
                    return False
                if response.status_code != 200:
                    self.unready_statuses.add((response.status_code, response.json()["error"]["code"]))
                    self.health_while_loading.add((health.status_code, health.json()["error"]["code"]))
                return response.status_code == 200

            wait_until(is_ready, READY_TIMEOUT_S, lambda: self.log)


def wait_until(
    condition: Callable[[], bool], timeout_s: float, explain: Callable[[], str] = lambda: ""
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not so after {timeout_s} s\n{explain()}"
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    """False for a zombie."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX"


def parent_of(pid: int) -> int:
    """Raises `FileNotFoundError` if it has ended."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _ticks(pid: int) -> int:
    """Hundredths of a second that the process has computed, without its threads of gloo."""
    ticks = _used(_stat(pid))
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        try:
            is_gloos = (thread / "comm").read_text() == "gloo_tcp_loop\n"
        except OSError:  # it has ended meanwhile
            continue
        if is_gloos:
            ticks -= _used(_stat(pid, int(thread.name)))
    return ticks


def _used(stat: list[str] | None) -> int:
    return 0 if stat is None else int(stat[11]) + int(stat[12])


def _stat(pid: int, thread: int | None = None) -> list[str] | None:
    """Fields of `/proc/PID/stat` from the third on (state), of one thread on demand; None if it has ended."""
    folder = f"/proc/{pid}" if thread is None else f"/proc/{pid}/task/{thread}"
    try:
        return Path(f"{folder}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def free_port() -> int:
    """Below those that the kernel gives to whoever asks for any: nobody gets it before the server binds
    it."""
    while True:
        port = secrets.choice(range(20_000, 32_000))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
