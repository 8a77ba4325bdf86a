"""The program that `limited_process` starts: a reader of untrusted files, with limits that the system
enforces.

    python -P limited_program.py READER PARENT MAX_BYTES MAX_SECONDS ARGUMENT...

READER is the path of a module with a function `read(file, output, arguments)`, which gives the exit status.
It is loaded, with what it imports, before the limits begin; from then on this process has MAX_BYTES of
addresses, MAX_SECONDS of processor time, can open neither file nor socket, and writes nothing but to the
pipes that it was given. It ends with PARENT. Nothing of the server is imported here: it would have to be
found, and loaded again for every file.
"""

import ctypes
import importlib.util
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

DAMAGED = 3
"""The exit status for memory that did not suffice; readers use it for damaged files, and higher ones as they
like."""

_PR_SET_PDEATHSIG = 1
"""prctl(2)"""
_WRITE_BYTES = 1 << 16
"""As much as a pipe holds."""

Read = Callable[[BinaryIO, BinaryIO, Sequence[str]], int]


def _end_with(parent: int) -> None:
    """Killed as soon as the thread ends that started this process, which waits for it, or the parent as a
    whole."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the server is gone")


def _load(path: Path) -> Read:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    read: Read = module.read
    return read


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
    read = _load(Path(reader))
    _limit(int(max_bytes), int(max_seconds))
    try:
        with open(sys.stdout.fileno(), "wb", buffering=_WRITE_BYTES, closefd=False) as output:
            return read(sys.stdin.buffer, output, arguments)
    except MemoryError:
        return DAMAGED


if __name__ == "__main__":
    sys.exit(main())
