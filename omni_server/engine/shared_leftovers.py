"""What a killed engine leaves in shared memory beside our queues: Python's semaphores and its shared blocks, and on a
CPU the memory in which the ranks of an engine exchange tensors.

Python's would be gone at the server's end only: their cleaner, Python's resource tracker, is one for all processes of a
server, and ends with it. The ranks' nobody would remove.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

from omni_server.transport.slab_queue import SHARED_MEMORY_DIR

_KINDS = (("sem.mp-", "semaphore"), ("psm_", "shared_memory"), ("vllm_dist_", None))
"""Beginning of the file's name, and what the resource tracker calls the kind; None where it does not know of it."""

_MAPPED = re.compile(rf" (\d+) +{SHARED_MEMORY_DIR}/", re.MULTILINE)
"""A line of /proc/PID/maps: what stands before the path is the inode. The path itself is that of the file's creation;
a semaphore is renamed after it has been mapped."""


def mapped_by(pids: Iterable[int]) -> frozenset[str]:
    """Names of the files of these kinds that one of the processes has mapped."""
    inodes: set[int] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            inodes.update(map(int, _MAPPED.findall(Path(f"/proc/{pid}/maps").read_text())))
    beginnings = tuple(beginning for beginning, _ in _KINDS)
    return frozenset(
        entry.name
        for entry in os.scandir(SHARED_MEMORY_DIR)
        if entry.name.startswith(beginnings) and entry.inode() in inodes
    )


def remove(names: Iterable[str]) -> None:
    """Removes those of the files that are still there, and has the resource tracker forget all."""
    for name in names:
        with suppress(FileNotFoundError):  # the engine has ended in good order
            (SHARED_MEMORY_DIR / name).unlink()
        kind = next(kind for beginning, kind in _KINDS if name.startswith(beginning))
        if kind is not None:
            path = f"/{name.removeprefix('sem.')}"
            # The engine may have ended between making or removing it and telling; the tracker cannot forget what it
            # does not know, but may be told twice.
            resource_tracker.register(path, kind)
            resource_tracker.unregister(path, kind)
