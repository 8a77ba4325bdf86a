"""What a command does with its own process: output that cannot be written does not end it, and memory that it
frees goes back to the system."""

import ctypes
import io
import logging
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import TextIO

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_TRIM_BYTES = 128 * 1024
"""glibc's own value, which it would raise together with the other one."""
_LARGE_BYTES = 1024 * 1024


class LossyStream(io.TextIOWrapper):
    """Unbuffered. Drops what cannot be written, and does not fail.

    A stream that keeps such data fails at every later flush, whoever calls it: multiprocessing does before it
    starts a process, so that no engine could be started, and Python at its end, which changes the exit code
    to 120.
    """

    def __init__(self, stream: io.TextIOWrapper) -> None:
        """Replaces `stream`, which must not be used any more."""
        raw = io.FileIO(stream.fileno(), "w", closefd=False)  # the descriptor belongs to the other stream
        super().__init__(raw, stream.encoding, stream.errors)  # type: ignore[arg-type]
        self.error: OSError | None = None
        """Why something has been dropped."""

    def write(self, text: str, /) -> int:
        left = text.encode(self.encoding, self.errors or "strict")
        try:
            while left:
                left = left[os.write(self.fileno(), left) :]
        except OSError as error:  # also of a full pipe that its other end has made non-blocking
            self.error = error
        return len(text)


def drop_unwritable_output() -> None:
    """From now on, standard output and standard error drop what cannot be written: on a full disk, or to a
    pipe whose reader has gone (`omni-server serve ... | head`). Streams that are not Python's own stay as
    they are, and so does one that was closed from the start."""
    sys.stdout, sys.stderr = _lossy(sys.stdout), _lossy(sys.stderr)


def _lossy(stream: TextIO) -> TextIO:
    # A FileIO where Python itself runs unbuffered, as in many containers.
    is_pythons = isinstance(stream, io.TextIOWrapper) and isinstance(
        stream.buffer, io.BufferedWriter | io.FileIO
    )
    return LossyStream(stream) if is_pythons and not isinstance(stream, LossyStream) else stream  # type: ignore[arg-type]


class Printer:
    """Prints for the user who started `serve` by hand. Logs one warning if standard output cannot be
    written."""

    def __init__(self) -> None:
        self._has_warned = False

    def __call__(self, text: str) -> None:
        print(text, flush=True)
        if isinstance(sys.stdout, LossyStream) and sys.stdout.error is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "standard output cannot be written (%s): the server continues without what it prints there",
                sys.stdout.error.strerror,
            )


def complain(text: str) -> None:
    """Prints to standard error. If that fails, the exit code has to do."""
    if sys.stderr is not None:  # None if closed from the start: `print` would take standard output
        drop_unwritable_output()
        print(text, file=sys.stderr, flush=True)


def progress_printer(out: Callable[[str], None]) -> Callable[[str], None]:
    """Prefixes each message with the seconds since this call."""
    began_s = time.monotonic()
    return lambda message: out(f"[{time.monotonic() - began_s:6.1f} s] {message}")


def return_freed_memory() -> None:
    """From now on, blocks of 1 MiB and more go back to the system as soon as this process frees them.

    glibc does that by itself only until such a block has been freed: from then on blocks of up to that size
    (32 MiB at most) come from its heaps, of which each thread has one and which seldom shrink. A server that
    has decoded a few large images at the same time would keep a gigabyte. The operator's
    `MALLOC_MMAP_THRESHOLD_` takes precedence.
    """
    if platform.libc_ver()[0] != "glibc" or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
