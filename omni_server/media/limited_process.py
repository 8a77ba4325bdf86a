"""Reads untrusted files with FFmpeg in a separate process.

A small video or audio file can unpack to gigabytes before FFmpeg returns its first packet, keep it busy for
minutes, or trigger a bug in FFmpeg. A process has memory and CPU time limits that the system enforces, can be
killed at any moment, and takes nothing down with it (`limited_program`). It starts in a tenth of a second;
the server does not load FFmpeg for this.
"""

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
"""The capacity of a pipe."""


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


class Cancellation:
    """Ends the process of a caller that has disconnected. `cancel` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.is_cancelled = False

    def cancel(self) -> None:
        """Ends the current reading and refuses later ones."""
        with self._lock:
            self.is_cancelled = True
            if self._process is not None:
                self._process.kill()

    @contextmanager
    def ends(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """Kills `process` if cancelled inside the block, and when the block ends."""
        with self._lock:
            self._process = process
            if self.is_cancelled:
                process.kill()
        try:
            yield
        finally:
            with self._lock:
                self._process = None
                process.kill()


@contextmanager
def read_in_process(reader: Reader, data: bytes, cancellation: Cancellation) -> Iterator["Output"]:
    """Yields the reader's output for `data`, its stdin; the process has ended after the block.

    Raises, like the methods of `Output`, one of the errors of `reader`, or `OmniError` if the program itself
    failed (the log has the reason) or the caller cancelled.
    """
    deadline = time.monotonic() + reader.timeout_s
    if cancellation.is_cancelled:
        raise _left()
    limits = (os.getpid(), reader.max_memory_bytes, reader.max_cpu_s)
    program = [sys.executable, "-P", str(_PROGRAM), str(reader.module), *map(str, limits), *reader.arguments]
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    file = os.memfd_create("media")
    try:
        with open(file, "wb", closefd=False) as writer:
            writer.write(data)
        os.lseek(file, 0, os.SEEK_SET)
        process = subprocess.Popen(
            program,
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environment, **reader.environment},
        )
    finally:
        os.close(file)
    with process, cancellation.ends(process):
        yield Output(process, deadline, reader, cancellation)


class Output:
    """Reads what the process writes, up to the deadline."""

    def __init__(
        self, process: subprocess.Popen[bytes], deadline: float, reader: Reader, cancellation: Cancellation
    ) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._pipe = process.stdout.fileno()
        self._errors = process.stderr.fileno()
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
        except subprocess.TimeoutExpired:
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
