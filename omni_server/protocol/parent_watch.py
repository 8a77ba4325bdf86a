"""Engine processes end when the server ends them, or with it where it had no chance to (kill -9).

vLLM's engine core blocks on its input socket and does not notice that nobody will ever write to it again. And a
Ctrl-C in a terminal goes to every process of the foreground group, systemd's SIGTERM to every process of the service:
the engines must not end before the server has drained what runs, so they get a group of their own, and heed SIGTERM
only where the server has said that it means it.
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

from omni_server.protocol.ending import ending_marker

GRACE_S = 10.0
"""For an orderly end; the process is killed after it."""

_watches = threading.Event()
_filters_sigterm = threading.Event()
_is_orphan = threading.Event()


def watch_parent() -> None:
    """End this process with the one that started it; harmless to call again, and in a process without such a parent."""
    parent = multiprocessing.parent_process()
    if parent is None or _watches.is_set():
        return
    _watches.set()
    os.setpgid(0, 0)
    threading.Thread(target=_watch, args=(parent.sentinel,), name="parent watch", daemon=True).start()


def end_with_parent() -> None:
    """`watch_parent`, and heed SIGTERM from the server only. To be called in the main thread, when vLLM has set its own
    handler; harmless to call again."""
    watch_parent()
    if _watches.is_set() and not _filters_sigterm.is_set():
        _filters_sigterm.set()
        _heed_sigterm_from_the_server_only()


def _watch(sentinel: int) -> None:
    wait([sentinel])
    _is_orphan.set()
    if signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:  # else the engine has only just been forked
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _heed_sigterm_from_the_server_only() -> None:
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
