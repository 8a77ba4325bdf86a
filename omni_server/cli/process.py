"""Settings of a command's own process: it survives unwritable output, opens as many files as it may, and
returns freed memory to the system."""

import ctypes
import io
import logging
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from typing import TextIO

from omni_server.errors import ConfigError

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_TRIM_BYTES = 128 * 1024
"""glibc's default, which it would raise together with the other one."""
_LARGE_BYTES = 1024 * 1024
_MIN_DESCRIPTORS, _MAX_DESCRIPTORS = 512, 65535
"""An engine has about 80, and the server 20 for each engine. The maximum is what `vllm serve` asks for."""


class LossyStream(io.TextIOWrapper):
    """An unbuffered stream that drops output that cannot be written instead of failing.

    A stream that keeps such data fails at every later flush. multiprocessing flushes before it starts a
    process, so no engine could start; Python flushes on exit, and the exit code would become 120.
    """

    def __init__(self, stream: io.TextIOWrapper) -> None:
        """Replaces `stream`, which must no longer be used."""
        raw = io.FileIO(stream.fileno(), "w", closefd=False)  # `stream` owns the descriptor
        super().__init__(raw, stream.encoding, stream.errors)  # type: ignore[arg-type]
        self.error: OSError | None = None
        """Why output was dropped."""

    def write(self, text: str, /) -> int:
        left = text.encode(self.encoding, self.errors or "strict")
        try:
            while left:
                left = left[os.write(self.fileno(), left) :]
        except OSError as error:  # also if a pipe is full that its other end made non-blocking
            self.error = error
        return len(text)


def drop_unwritable_output() -> None:
    """Makes standard output and standard error drop what cannot be written: on a full disk, or to a pipe
    whose reader has exited (`omni-server serve ... | head`). Does not change streams that are not Python's
    own, or that were closed from the start."""
    sys.stdout, sys.stderr = _lossy(sys.stdout), _lossy(sys.stderr)


def _lossy(stream: TextIO) -> TextIO:
    # A FileIO if Python itself runs unbuffered, as in many containers.
    is_pythons = isinstance(stream, io.TextIOWrapper) and isinstance(
        stream.buffer, io.BufferedWriter | io.FileIO
    )
    return LossyStream(stream) if is_pythons and not isinstance(stream, LossyStream) else stream  # type: ignore[arg-type]


class Printer:
    """Prints for users who start `serve` by hand. Logs one warning if standard output is unwritable."""

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
    """Prints to standard error; if that fails, only the exit code remains."""
    if sys.stderr is not None:  # None if closed from the start: `print` would use standard output
        drop_unwritable_output()
        print(text, file=sys.stderr, flush=True)


def progress_printer(out: Callable[[str], None]) -> Callable[[str], None]:
    """Prefixes each message with the seconds since this call."""
    began_s = time.monotonic()
    return lambda message: out(f"[{time.monotonic() - began_s:6.1f} s] {message}")


def raise_descriptor_limit() -> None:
    """Raises the limit of file descriptors as far as the system allows, for this process and its engines.

    Raises `ConfigError` if they are too few.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if allowed < _MIN_DESCRIPTORS:
        raise ConfigError(
            f"the limit of file descriptors is {allowed} (ulimit -Hn), and a server needs {_MIN_DESCRIPTORS}"
        )
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def return_freed_memory() -> None:
    """From now on, blocks of 1 MiB and more return to the system as soon as this process frees them.

    By default, glibc stops doing so once such a block is freed: it then allocates blocks of up to that size
    (32 MiB at most) from its per-thread heaps, which seldom shrink. A server that decoded a few large images
    at the same time would keep a gigabyte. The operator's `MALLOC_MMAP_THRESHOLD_` takes precedence.
    """
    if platform.libc_ver()[0] != "glibc" or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
