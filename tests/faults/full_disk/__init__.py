"""Disks that are full for a server and all its processes, without the privilege that a small file system
would need."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.full_disk.sitecustomize import FOLDERS_VARIABLE, ROOM


def with_full_disks(*folders: Path) -> dict[str, str]:
    """What the environment of a process needs for which there is no room in the folders. Empty files and
    folders can still be made there, as on most full disks."""
    before = os.environ.get("PYTHONPATH")
    paths = [str(Path(__file__).parent), *([before] if before else [])]
    return {"PYTHONPATH": os.pathsep.join(paths), FOLDERS_VARIABLE: os.pathsep.join(map(str, folders))}


def make_room(folder: Path) -> None:
    """In one of them."""
    (folder / ROOM).touch()


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """A folder with room has none in the block."""
    (folder / ROOM).unlink()
    try:
        yield
    finally:
        make_room(folder)
