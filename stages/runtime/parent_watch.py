"""Engine processes end with the server, also where it had no chance to end them (kill -9).

vLLM's engine core blocks on its input socket and does not notice that nobody will ever write to it again.
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
    threading.Thread(target=_watch, args=(parent.sentinel,), name="parent watch", daemon=True).start()


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
