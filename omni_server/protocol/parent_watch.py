"""Ends engine processes when the server ends them, or with the server if it could not do so (kill -9).

vLLM's engine core blocks on its input socket and does not notice that nothing will ever write to it again.
Its process therefore waits for its parent: `multiprocessing`'s sentinel of the parent is a pipe, which the
kernel closes however the parent ends. No process ids are compared, so a reused id does no harm.

A Ctrl-C in a terminal reaches every process of the foreground group, and a service manager sends SIGTERM to
all processes of a service (systemd's `KillMode=control-group`, its default). The server then drains the
running requests, for which it needs the engines, and ends them afterwards, also with SIGTERM. Engines
therefore get their own process group, and ignore SIGTERM unless the server's file `ending_marker` is in their
folder for temporary files.
"""

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType

GRACE_S = 10.0
"""Time for an orderly end, after which the process is killed."""

_MARKER = "ending"

_watches = threading.Event()
_filters_sigterm = threading.Event()
_is_orphan = threading.Event()


def ending_marker(folder: Path) -> Path:
    """Returns the file whose presence makes the engines obey SIGTERM. `folder` is their TMPDIR, the server's
    own."""
    return folder / _MARKER


def watch_parent() -> None:
    """Ends this process with the one that started it. Harmless if called again, or in a process that
    `multiprocessing` has not started."""
    parent = multiprocessing.parent_process()
    if parent is None or _watches.is_set():
        return
    _watches.set()
    os.setpgid(0, 0)
    threading.Thread(target=_watch, args=(parent.sentinel,), name="parent watch", daemon=True).start()


def end_with_parent() -> None:
    """Calls `watch_parent`, and ignores every SIGTERM but the server's. Must be called in the main thread,
    after vLLM has set its own handler. Harmless if called again."""
    watch_parent()
    if not _watches.is_set() or _filters_sigterm.is_set():
        return
    _filters_sigterm.set()
    before = signal.getsignal(signal.SIGTERM)
    marker = ending_marker(Path(tempfile.gettempdir()))

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        if not _is_orphan.is_set() and not marker.exists():
            return
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, on_sigterm)


def _watch(sentinel: int) -> None:
    wait([sentinel])
    _is_orphan.set()
    if signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:  # else the engine has only just been forked
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
