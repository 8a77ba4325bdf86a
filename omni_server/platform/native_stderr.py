"""Logs what native libraries write to standard error, in the log's format and at a limited rate.

C and C++ libraries write to file descriptor 2, bypassing Python's logging. Some write a line for every error
in a client's input, so that a small request produces megabytes. This module replaces the descriptor with a
pipe that a thread reads. Python's own output, logs included, still goes to the real standard error.
"""

import atexit
import contextlib
import faulthandler
import fcntl
import io
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker

from omni_server.platform.log_format import TEXT_FORMAT

logger = logging.getLogger("native")

MAX_LINES = 20
"""Logged per `PERIOD_S`; other lines are counted."""
PERIOD_S = 10.0
MAX_LINE_CHARS = 500
_PIPE_BYTES = 1 << 20
"""Linux's limit. A write to a full pipe is lost, and silences `std::cerr` from then on. It must not block:
the reader needs the interpreter's lock, which the writing library may hold."""
_READ_BYTES = 1 << 16
_PARTIAL_LINE_S = 1.0
"""An incomplete line is logged as it is after this time."""
_LAST_LINES_S = 1.0
"""Time for the reader to log the rest when the process ends."""

_STDERR = 2


@dataclass
class _Redirection:
    raw: io.FileIO
    """Under `sys.stderr`; its descriptor is `real` meanwhile."""
    real: int
    """The old descriptor 2."""
    read_end: int
    write_end: int
    reader: threading.Thread = field(init=False)
    is_ending: threading.Event = field(default_factory=threading.Event)


_redirection: _Redirection | None = None
_lock = threading.Lock()


def redirect_native_stderr() -> None:
    """Call this once per process, after logging is set up; further calls do nothing. Forked processes do not
    inherit it. Does nothing if `sys.stderr` is not Python's own stream for descriptor 2."""
    global _redirection
    with _lock:
        raw = _raw_stderr()
        if _redirection is not None or raw is None:
            return
        if not logger.hasHandlers():  # in an engine, where vLLM sets up only its own loggers
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter(TEXT_FORMAT))
            logger.addHandler(handler)
        resource_tracker.ensure_running()  # it reports leaks to the real standard error
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        with contextlib.suppress(OSError):  # above the user's limit
            fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        _redirection = _Redirection(raw, os.dup(_STDERR), read_end, write_end)
        _point(raw, _redirection.real)
        # If a library aborts the process, its message is lost; this shows where it happened.
        faulthandler.enable(file=_redirection.real)
        _redirection.reader = threading.Thread(
            target=_read, args=(read_end, _redirection.is_ending), name="native stderr", daemon=True
        )
        _redirection.reader.start()
        os.dup2(write_end, _STDERR)


@contextlib.contextmanager
def real_stderr() -> Iterator[None]:
    """Restores descriptor 2 within the block, for starting programs, which inherit it."""
    with _lock:
        if _redirection is not None:
            os.dup2(_redirection.real, _STDERR)
        try:
            yield
        finally:
            if _redirection is not None:
                os.dup2(_redirection.write_end, _STDERR)


def _raw_stderr() -> io.FileIO | None:
    """The raw stream of `sys.stderr`, if that is descriptor 2."""
    buffer = sys.stderr.buffer if isinstance(sys.stderr, io.TextIOWrapper) else None
    raw = buffer.raw if isinstance(buffer, io.BufferedWriter) else buffer
    return raw if isinstance(raw, io.FileIO) and raw.fileno() == _STDERR else None


def _point(raw: io.FileIO, descriptor: int) -> None:
    """Changes `raw` in place, because log handlers already hold the stream."""
    raw.__init__(descriptor, "w", closefd=False)  # type: ignore[misc]


def _read(read_end: int, is_ending: threading.Event) -> None:
    log = _LimitedLog()
    poll = select.poll()
    poll.register(read_end, select.POLLIN)
    rest = b""
    while True:
        wait_s = _PARTIAL_LINE_S if rest else log.wait_s()
        if not poll.poll(None if wait_s is None else 1000 * wait_s):
            log.write([rest] if rest else [])
            rest = b""
            continue
        *lines, rest = (rest + os.read(read_end, _READ_BYTES)).split(b"\n")
        rest = rest[: 4 * MAX_LINE_CHARS]  # the shown part; a character takes up to 4 bytes
        log.write(lines)
        if is_ending.is_set() and not poll.poll(0):
            log.write([rest])
            log.end_period()
            return


class _LimitedLog:
    def __init__(self) -> None:
        self._period_ends = 0.0
        self._num_logged = 0
        self._num_dropped = 0

    def wait_s(self) -> float | None:
        """Time until the number of dropped lines is logged; None without any."""
        return max(self._period_ends - time.monotonic(), 0.0) if self._num_dropped else None

    def write(self, lines: list[bytes]) -> None:
        now = time.monotonic()
        if now >= self._period_ends:
            self.end_period()
            self._period_ends = now + PERIOD_S
        for line in filter(None, lines):
            if self._num_logged == MAX_LINES:
                self._num_dropped += 1
            else:
                self._num_logged += 1
                logger.warning("%s", _shown(line))

    def end_period(self) -> None:
        if self._num_dropped:
            logger.warning("%d more lines of native libraries were dropped", self._num_dropped)
        self._num_logged = self._num_dropped = 0


def _shown(line: bytes) -> str:
    text = line[: 4 * MAX_LINE_CHARS].decode(errors="replace").rstrip()
    shown = "".join(character if character.isprintable() else " " for character in text[:MAX_LINE_CHARS])
    return shown + ("..." if len(text) > MAX_LINE_CHARS else "")


def _restore(redirection: _Redirection) -> None:
    os.dup2(redirection.real, _STDERR)
    faulthandler.enable(file=_STDERR)
    _point(redirection.raw, _STDERR)
    os.close(redirection.real)


@atexit.register
def _end() -> None:
    """Lets libraries write to the real standard error while Python exits."""
    global _redirection
    redirection, _redirection = _redirection, None
    if redirection is None:
        return
    os.dup2(redirection.real, _STDERR)
    redirection.is_ending.set()
    with contextlib.suppress(BlockingIOError):
        os.write(redirection.write_end, b"\n")  # wakes the reader
    redirection.reader.join(_LAST_LINES_S)
    _restore(redirection)


def _after_fork() -> None:
    """Only the parent has the reader."""
    global _redirection, _lock
    _lock = threading.Lock()
    redirection, _redirection = _redirection, None
    if redirection is not None:
        _restore(redirection)
        os.close(redirection.read_end)
        os.close(redirection.write_end)


os.register_at_fork(after_in_child=_after_fork)
