"""Reads untrusted files in processes with limits that the system enforces.

A small file can unpack to gigabytes before its decoder returns anything, keep the decoder busy for minutes,
or trigger a bug in it. A process has limits of memory and CPU time, can be killed at any moment, and takes
nothing down with it. A program with the decoder forks one for each file (`limited_program`), which takes
milliseconds; the server does not load the decoders for this."""

import atexit
import fcntl
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from omni_server.errors import InvalidRequestError, OmniError
from omni_server.media.limited_program import DAMAGED

logger = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name("limited_program.py")
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH")
"""What Python may need to find FFmpeg. The server's keys are in other variables and are not passed on."""
_MAX_LOG_BYTES = 1 << 14
"""Kept from the process's stderr."""
_READ_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20
"""Linux's limit for users. With the default of 64 KiB, large images take twice as many switches."""
_MAX_EXIT_CODE_BYTES = 16
_UNKNOWN_EXIT_CODE = 255
"""Of a process whose program was killed, and of one that has been waited for."""
_MIN_WAIT_S = 0.001
_KILL_TIMEOUT_S = 5.0
"""Time for a process to end after SIGKILL."""


@dataclass(frozen=True)
class Reader:
    """The module that `limited_program` loads, its limits, and the error that each exit status means."""

    module: Path
    arguments: Sequence[str]
    reads: str
    """For the log and the answer if the program itself fails: "the video"."""
    max_memory_bytes: int
    """Address space, without the file."""
    max_cpu_s: int
    timeout_s: float
    refusals: Mapping[int, InvalidRequestError]
    """By exit status. `DAMAGED` also covers exceeded memory limits and faults of the library."""
    too_slow: InvalidRequestError
    environment: Mapping[str, str] = field(default_factory=dict)


class Program:
    """A running program that reads each file in a process of its own, with a function for `limited_program`.
    It is started when it is first used, again if it was killed, and ends with this process."""

    def __init__(self, launch: Callable[[socket.socket], Callable[[], int]]) -> None:
        """`launch` starts a program that serves its end of a socket (`ReaderProcesses`); returns a function
        that ends it and returns its exit code, negative for a signal."""
        self._launch = launch
        self._lock = threading.Lock()
        self._running: tuple[socket.socket, Callable[[], int]] | None = None

    def start(self, job: bytes, descriptors: Sequence[int]) -> None:
        """Starts a process for a file; see `ReaderProcesses`."""
        with self._lock:
            if self._running is not None:
                with suppress(OSError):
                    socket.send_fds(self._running[0], [job], descriptors)
                    return
                logger.error(
                    "A program that limits its processes ended with exit code %d; it is restarted",
                    self._end(),
                )
            control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._running = control, self._launch(theirs)
            socket.send_fds(control, [job], descriptors)

    def end(self) -> None:
        with self._lock:
            if self._running is not None:
                self._end()

    def _end(self) -> int:
        assert self._running is not None
        control, end = self._running
        self._running = None
        control.close()
        return end()


_programs: dict[Path, Program] = {}
"""By the module that they have loaded."""


@atexit.register
def end_programs() -> None:
    """Ends the programs that have loaded a module. Those that are needed later are started again."""
    while _programs:
        _programs.popitem()[1].end()


def _load_module(module: Path, environment: Mapping[str, str], control: socket.socket) -> Callable[[], int]:
    """Starts a program that reads with `module`; returns a function that ends it."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    process = subprocess.Popen(
        [sys.executable, "-P", str(_PROGRAM), str(module), str(control.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[control.fileno()],
        env={**kept, **environment},
    )

    def end() -> int:
        process.kill()
        return process.wait()

    return end


class _Process:
    """A process that reads a file. Has ended when the block ends."""

    def __init__(self, program: Program, job: bytes, data: bytes) -> None:
        with ExitStack() as held, ExitStack() as passed:
            self.output, output = _pipe(held, passed)
            with suppress(OSError):  # above the user's limit
                fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            self.errors, errors = _pipe(held, passed)
            self._peer, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            held.enter_context(self._peer)
            passed.enter_context(peer)
            file = os.memfd_create("media")
            passed.callback(os.close, file)
            with open(file, "wb", closefd=False) as writer:
                writer.write(data)
            os.lseek(file, 0, os.SEEK_SET)
            program.start(job, [file, output, errors, peer.fileno()])
            self._held = held.pop_all()

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, *_: object) -> None:
        with self._held:
            self.kill()
            with suppress(TimeoutError):
                self.wait(_KILL_TIMEOUT_S)

    def kill(self) -> None:
        with suppress(OSError):  # the program has ended
            self._peer.shutdown(socket.SHUT_WR)

    def wait(self, timeout_s: float) -> int:
        """Returns the exit code, negative for a signal. Raises `TimeoutError`."""
        self._peer.settimeout(max(timeout_s, _MIN_WAIT_S))
        with suppress(ConnectionError):
            if code := self._peer.recv(_MAX_EXIT_CODE_BYTES):
                return int(code)
        return _UNKNOWN_EXIT_CODE


def _pipe(held: ExitStack, passed: ExitStack) -> tuple[int, int]:
    """The read end, which `held` closes, and the write end, which `passed` closes."""
    read_end, write_end = os.pipe()
    held.callback(os.close, read_end)
    passed.callback(os.close, write_end)
    return read_end, write_end


class Cancellation:
    """Ends the process of a caller that has disconnected. `cancel` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        """Ends the current reading and refuses later ones."""
        with self._lock:
            self.is_cancelled = True
            if self._process is not None:
                self._process.kill()

    @contextmanager
    def ends(self, process: _Process) -> Iterator[None]:
        """Kills `process` if cancelled inside the block."""
        with self._lock:
            self._process = process
            if self.is_cancelled:
                process.kill()
        try:
            yield
        finally:
            with self._lock:
                self._process = None


@contextmanager
def read_in_process(
    reader: Reader, data: bytes, cancellation: Cancellation, program: Program | None = None
) -> Iterator["Output"]:
    """Yields the reader's output for `data`, its file; the process has ended after the block. `program` takes
    the place of one that loads the reader's module.

    Raises, like the methods of `Output`, one of the errors of `reader`, or `OmniError` if the program itself
    failed (the log has the reason) or the caller cancelled.
    """
    deadline = time.monotonic() + reader.timeout_s
    if cancellation.is_cancelled:
        raise _left()
    if program is None:
        launch = partial(_load_module, reader.module, reader.environment)
        program = _programs.setdefault(reader.module, Program(launch))
    job = json.dumps([reader.max_memory_bytes, reader.max_cpu_s, *reader.arguments]).encode()
    with _Process(program, job, data) as process, cancellation.ends(process):
        yield Output(process, deadline, reader, cancellation)


class Output:
    """Reads what the process writes, up to the deadline."""

    def __init__(
        self, process: _Process, deadline: float, reader: Reader, cancellation: Cancellation
    ) -> None:
        self._process = process
        self._pipe = process.output
        self._errors = process.errors
        self._poll = select.poll()
        self._poll.register(self._pipe, select.POLLIN)
        self._poll.register(self._errors, select.POLLIN)
        self._log = b""
        self._deadline = deadline
        self._reader = reader
        self._cancellation = cancellation

    def read(self, num_bytes: int) -> bytes:
        """Reads exactly `num_bytes`, or raises."""
        data = bytearray(num_bytes)
        self.read_into(memoryview(data))
        return bytes(data)

    def read_into(self, buffer: memoryview) -> None:
        """Fills `buffer` with bytes. Raises if there are fewer."""
        begin = 0
        while begin < len(buffer):
            self._wait_for_bytes()
            num_bytes = os.readv(self._pipe, [buffer[begin:]])
            if not num_bytes:
                self._check_end()
                raise self.damaged("it wrote less than it has to")
            begin += num_bytes

    def chunks(self) -> Iterator[bytes]:
        """Yields the rest as it arrives."""
        while True:
            self._wait_for_bytes()
            chunk = os.read(self._pipe, _READ_BYTES)
            if not chunk:
                self._check_end()
                return
            yield chunk

    def check_nothing_left(self) -> None:
        """Also checks that the process succeeded."""
        for _ in self.chunks():
            raise self.damaged("it wrote more than it has to")

    def damaged(self, what: str) -> InvalidRequestError:
        """The error for a protocol violation; `what` is logged."""
        logger.warning("The process that read %s went wrong: %s", self._reader.reads, what)
        return self._reader.refusals[DAMAGED]

    def _wait_for_bytes(self) -> None:
        """Also returns at the end. Reads stderr meanwhile: the process would block on a full pipe."""
        while True:
            left_s = self._deadline - time.monotonic()
            ready = self._poll.poll(left_s * 1000) if left_s > 0 else []
            if not ready:
                raise self._reader.too_slow
            pipes = [pipe for pipe, _ in ready]
            if self._errors in pipes and not self._read_log():
                self._poll.unregister(self._errors)
            if self._pipe in pipes:
                return

    def _read_log(self) -> bool:
        """Returns whether anything was left."""
        said = os.read(self._errors, _READ_BYTES)
        self._log = (self._log + said)[-_MAX_LOG_BYTES:]
        return bool(said)

    def _check_end(self) -> None:
        """Call after the last byte. Raises the error that the exit status means."""
        try:
            status = self._process.wait(max(self._deadline - time.monotonic(), 0))
        except TimeoutError:
            raise self._reader.too_slow from None
        if status == 0:
            return
        if self._cancellation.is_cancelled:
            raise _left()
        if status in self._reader.refusals:
            raise self._reader.refusals[status]
        if status == -signal.SIGXCPU:
            raise self._reader.too_slow
        if status < 0:
            raise self.damaged(f"it was ended by signal {-status}")
        self._poll.unregister(self._pipe)
        while self._poll.poll(0) and self._read_log():
            pass
        said = self._log.decode(errors="replace")
        logger.error("The reader of %s failed with status %d: %s", self._reader.reads, status, said)
        raise OmniError(f"The server could not read {self._reader.reads}.")


def _left() -> OmniError:
    return OmniError("The request was cancelled.")
