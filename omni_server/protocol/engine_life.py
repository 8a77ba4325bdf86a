"""An engine's process ends with its server from its first moment on.

Later `stages.runtime.parent_watch` does it better. But an engine reads its stage's classes only when vLLM has greeted
its server, and waits five minutes for the greeting of one that was killed meanwhile.
"""

import multiprocessing
import os
import signal
import threading
import time

GRACE_S = 10.0
"""For an orderly end; the process is killed after it."""
_POLL_S = 0.5
_ENGINE_CORE = "EngineCore"
"""vLLM's name for the process of an engine core; that of a data-parallel rank has a number behind it."""


class EngineLife:
    """Goes with what an engine is started with: the process that unpickles it watches the one that pickled it."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return _arrived, (os.getpid(),)


_has_arrived = threading.Event()


def _arrived(server: int) -> EngineLife:
    # Not in a worker of several ranks, whose parent is the engine core, nor where it is copied: in the server, or in an
    # engine.
    if multiprocessing.current_process().name.startswith(_ENGINE_CORE) and not _has_arrived.is_set():
        _has_arrived.set()
        threading.Thread(target=_end_with, args=(server,), name="server watch", daemon=True).start()
    return EngineLife()


def _end_with(server: int) -> None:
    while os.getppid() == server:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
