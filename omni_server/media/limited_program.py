"""The program that `limited_process` starts: reads untrusted files, each in a process of its own, with limits
that the system enforces.

    python -P limited_program.py READER CONTROL

READER is the path of a module with a function `read(file, output, arguments)`, which returns the exit status.
This process loads it with its imports, and forks a process for each file that arrives at the socket CONTROL.
Such a process has a limit of memory and of CPU time, can open neither files nor sockets, and can only write
to the pipes that it was given. All processes end when the other end of CONTROL is closed. This program
imports nothing from the server, which would have to be found, and loaded again."""

import ctypes
import gc
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, NoReturn

DAMAGED = 3
"""The exit status if memory runs out; readers return it for damaged files, and may define others."""

_PR_SET_PDEATHSIG = 1
"""prctl(2)"""
_MAX_JOB_BYTES = 1 << 16
_WRITE_BYTES = 1 << 16
"""The capacity of a pipe."""
_STANDARD_FILES = range(3)
_ALL_FILES = 1 << 30

Read = Callable[[BinaryIO, BinaryIO, Sequence[str]], int]


@dataclass
class _Process:
    pid: int
    ended: int
    """Its pidfd."""
    peer: socket.socket
    """To the process while it waits for a file, then to the caller."""


class ReaderProcesses:
    """Runs `read` in a process for each file. Must be used in a process with a single thread."""

    def __init__(self, control: socket.socket, read: Read, base_bytes: int = 0) -> None:
        """Through `control` comes a JSON array for each file: the limit of the address space, in bytes beyond
        `base_bytes`, the limit of CPU time, in seconds, and the arguments of `read`. With it come four
        descriptors: the file, the pipes for output and errors, and a socket. Its other end is the caller's,
        who closes it to end the process, or receives the exit code there, negative for a signal.
        """
        self._control = control
        self._read = read
        self._base_bytes = base_bytes
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._start)
        gc.freeze()  # the collector would write to each page that the processes share
        self._next = self._fork()

    def serve(self) -> None:
        """Returns when the other end of `control` is closed. The processes end with this one."""
        with suppress(EOFError):
            while True:
                for key, _ in self._selector.select():
                    key.data()

    def _start(self) -> None:
        job, files, _, _ = socket.recv_fds(self._control, _MAX_JOB_BYTES, len(_STANDARD_FILES) + 1)
        if not job:
            raise EOFError
        caller = socket.socket(fileno=files.pop())
        try:
            socket.send_fds(self._next.peer, [job], files)
        except OSError:  # it was killed while it waited
            os.waitpid(self._next.pid, 0)
            self._next = self._fork()
            socket.send_fds(self._next.peer, [job], files)
        for file in files:
            os.close(file)
        process = self._next
        process.peer = caller
        self._selector.register(caller, selectors.EVENT_READ, partial(self._kill, process))
        self._selector.register(process.ended, selectors.EVENT_READ, partial(self._end, process))
        self._next = self._fork()  # beforehand: callers do not wait for it

    def _kill(self, process: _Process) -> None:
        if process.peer.fileno() >= 0:  # it has not ended at the same time
            self._selector.unregister(process.peer)
            os.kill(process.pid, signal.SIGKILL)

    def _end(self, process: _Process) -> None:
        _, status = os.waitpid(process.pid, 0)
        with suppress(OSError):
            process.peer.send(str(os.waitstatus_to_exitcode(status)).encode())
        with suppress(KeyError):
            self._selector.unregister(process.peer)
        self._selector.unregister(process.ended)
        process.peer.close()
        os.close(process.ended)

    def _fork(self) -> _Process:
        peer, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            _run(self._read, own, parent, self._base_bytes)
        own.close()
        return _Process(pid, os.pidfd_open(pid), peer)


def _run(read: Read, peer: socket.socket, parent: int, base_bytes: int) -> NoReturn:
    """The whole life of a process: waits for its file, and reads it."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            status = _read(read, peer, base_bytes)
    except MemoryError:
        status = DAMAGED
    except BaseException:  # noqa: BLE001 - the caller logs it
        traceback.print_exc()
    finally:
        os._exit(status)


def _read(read: Read, peer: socket.socket, base_bytes: int) -> int:
    os.closerange(_STANDARD_FILES.stop, peer.fileno())
    os.closerange(peer.fileno() + 1, _ALL_FILES)
    job, files, _, _ = socket.recv_fds(peer, _MAX_JOB_BYTES, len(_STANDARD_FILES))
    if not job:  # the program ends
        return 0
    for standard, descriptor in zip(_STANDARD_FILES, files, strict=True):
        os.dup2(descriptor, standard)
    os.closerange(_STANDARD_FILES.stop, _ALL_FILES)
    max_bytes, max_seconds, *arguments = json.loads(job)
    resource.setrlimit(resource.RLIMIT_AS, (base_bytes + max_bytes, base_bytes + max_bytes))
    # If both were equal, the kernel would send SIGKILL and the reason would be unknown.
    resource.setrlimit(resource.RLIMIT_CPU, (max_seconds, max_seconds + 1))
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(kind, (0, 0))
    with open(0, "rb", closefd=False) as file, open(1, "wb", _WRITE_BYTES, closefd=False) as output:
        return read(file, output, arguments)


def main() -> None:
    reader, control = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM):  # the whole group gets them, and the server may still read
        signal.signal(number, signal.SIG_IGN)
    read: Read = runpy.run_path(reader)["read"]
    ReaderProcesses(socket.socket(fileno=int(control)), read).serve()


if __name__ == "__main__":
    main()
