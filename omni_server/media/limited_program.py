"""The program that `limited_process` starts: a reader of untrusted files, with limits that the system
enforces.

    python -P limited_program.py READER PARENT MAX_BYTES MAX_SECONDS ARGUMENT...

READER is the path of a module with a function `read(file, output, arguments)`, which returns the exit status.
It is loaded with its imports before the limits apply. From then on, this process has MAX_BYTES of address
space and MAX_SECONDS of CPU time, can open neither files nor sockets, and can only write to the pipes that it
was given. It ends with PARENT. It imports nothing from the server, which would have to be found, and loaded
again for every file.
"""

import ctypes
import os
import resource
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from typing import BinaryIO

DAMAGED = 3
"""The exit status if memory runs out; readers return it for damaged files, and may define others."""

_PR_SET_PDEATHSIG = 1
"""prctl(2)"""
_WRITE_BYTES = 1 << 16
"""The capacity of a pipe."""

Read = Callable[[BinaryIO, BinaryIO, Sequence[str]], int]


def _end_with(parent: int) -> None:
    """The kernel kills this process when the thread that started it, or the whole parent, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the server is gone")


def _limit(max_bytes: int, max_seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    # If both were equal, the kernel would send SIGKILL and the reason would be unknown.
    resource.setrlimit(resource.RLIMIT_CPU, (max_seconds, max_seconds + 1))
    # Standard input and output are already open and stay open.
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(kind, (0, 0))


def main() -> int:
    reader, parent, max_bytes, max_seconds, *arguments = sys.argv[1:]
    _end_with(int(parent))
    read: Read = runpy.run_path(reader)["read"]
    _limit(int(max_bytes), int(max_seconds))
    try:
        with open(sys.stdout.fileno(), "wb", buffering=_WRITE_BYTES, closefd=False) as output:
            return read(sys.stdin.buffer, output, arguments)
    except MemoryError:
        return DAMAGED


if __name__ == "__main__":
    sys.exit(main())
