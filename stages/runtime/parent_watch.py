"""Engine processes end when the server ends them, or with it where it had no chance to (kill -9).

vLLM's engine core blocks on its input socket and does not notice that nobody will ever write to it again. And a
Ctrl-C in a terminal goes to every process of the foreground group: the engines must not end before the server has
drained what runs, so they get a group of their own.
"""

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import wait

GRACE_S = 10.0
"""For an orderly end; the process is killed after it."""

_started = threading.Event()


def end_with_parent() -> None:
    """Watch the process that spawned this one; harmless to call again and in a process without such a parent."""
    parent = multiprocessing.parent_process()
    if parent is None or _started.is_set():
        return
    _started.set()
    os.setpgid(0, 0)
    threading.Thread(target=_watch, args=(parent.sentinel,), name="parent watch", daemon=True).start()


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
