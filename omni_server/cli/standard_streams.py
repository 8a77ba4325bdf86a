"""What a server says on standard output and standard error is no condition for its work: it goes on where they cannot
be written, on a full disk, or to a pipe whose reader has gone (`omni-server serve ... | head`)."""

import errno
import io
import logging
import os
import sys
from typing import TextIO

logger = logging.getLogger(__name__)


class _WholeWrites(io.FileIO):
    """Unbuffered, and nothing of a write is left out unless it fails."""

    def write(self, data: bytes, /) -> int:  # type: ignore[override]  # all that a text stream writes
        left = memoryview(data)
        size = len(left)
        while left:
            written = super().write(left)
            if written is None:  # a pipe that its other end has made non-blocking, and that is full
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            left = left[written:]
        return size


class LossyStream(io.TextIOWrapper):
    """Writes at once. What cannot be written is lost, and whoever prints it does not fail.

    What a stream holds and cannot write, every later flush would fail at, whoever calls it: multiprocessing does
    before it starts a process, so that no engine could be started, and Python at the end, which changes the exit code
    to 120.
    """

    def __init__(self, stream: io.TextIOWrapper) -> None:
        """Instead of `stream`, which is to be used no more."""
        raw = _WholeWrites(stream.fileno(), "w", closefd=False)  # the descriptor is the other stream's
        super().__init__(raw, stream.encoding, stream.errors, write_through=True)  # type: ignore[arg-type]
        self.error: OSError | None = None
        """Why something has been lost."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self.error = error
            return len(text)


def lose_what_cannot_be_written() -> None:
    """From now on, on standard output and standard error. Streams that are not Python's own stay as they are, and so
    does one that was closed from the start."""
    sys.stdout, sys.stderr = _lossy(sys.stdout), _lossy(sys.stderr)


def _lossy(stream: TextIO) -> TextIO:
    # A FileIO where Python itself runs unbuffered, as in many containers.
    is_pythons = isinstance(stream, io.TextIOWrapper) and isinstance(stream.buffer, io.BufferedWriter | io.FileIO)
    return LossyStream(stream) if is_pythons and not isinstance(stream, LossyStream) else stream  # type: ignore[arg-type]


class Printer:
    """What `serve` tells on standard output whoever started it by hand."""

    def __init__(self) -> None:
        self._has_warned = False

    def __call__(self, text: str) -> None:
        """The log has one warning if it is lost."""
        print(text, flush=True)
        if isinstance(sys.stdout, LossyStream) and sys.stdout.error is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "standard output cannot be written (%s): the server goes on without what it prints there",
                sys.stdout.error.strerror,
            )


def complain(text: str) -> None:
    """On standard error. The exit code says it, too."""
    if sys.stderr is not None:  # closed from the start: `print` would take standard output
        lose_what_cannot_be_written()
        print(text, file=sys.stderr, flush=True)
