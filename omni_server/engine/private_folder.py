"""A folder for the sockets between the server and its engines, which no other user of the machine can enter.

vLLM makes them in /tmp, where the umask decides who may connect: with one of 000 anybody could, and whoever can speaks
for an engine. In a folder of mode 0700 nobody else reaches them. It is removed when the process ends; what a killed one
has left, its dead sockets included, the next start removes.
"""

import atexit
import fcntl
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

PREFIX = "omni-ipc-"


@cache
def private_folder() -> Path:
    """The one of this process; made when it is first asked for."""
    sweep_dead_folders()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
    # Held for as long as this process lives: how others know, in whatever pid namespace.
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    atexit.register(_remove, folder, os.getpid())
    return folder


def sweep_dead_folders() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # just removed, another user's, or no folder
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its owner lives
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # and no child of it
        shutil.rmtree(folder, ignore_errors=True)
