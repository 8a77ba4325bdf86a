"""Python imports this module when it starts, if its folder is in PYTHONPATH. Below the folders that the
environment names files are made, but what is opened for writing is /dev/full: each write fails in the kernel,
with ENOSPC."""

import builtins
import io
import os
from typing import Any

FOLDERS_VARIABLE = "OMNI_SERVER_TEST_FULL_DISKS"
ROOM = ".room"
"""A file of this name in one of the folders: there is room again for as long as it is there."""

_open, _os_open = io.open, os.open


def is_full(path: Any, folders: list[str]) -> bool:
    if not isinstance(path, str | bytes | os.PathLike):  # a file descriptor
        return False
    full = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - this runs in every process, and pathlib need not
    return any(full.startswith(f"{folder}/") and not os.path.exists(f"{folder}/{ROOM}") for folder in folders)  # noqa: PTH110


def fill(folders: list[str]) -> None:
    def os_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        file = _os_open(path, flags, mode, dir_fd=dir_fd)
        if flags & (os.O_WRONLY | os.O_RDWR) and dir_fd is None and is_full(path, folders):
            full = _os_open("/dev/full", os.O_RDWR)
            os.dup2(full, file, inheritable=False)
            os.close(full)
        return file

    def open_(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if set(mode) & set("wax+") and is_full(file, folders):
            options.setdefault("opener", lambda path, flags: os_open(path, flags, 0o666))
        return _open(file, mode, *args, **options)

    os.open = os_open
    io.open = builtins.open = open_  # type: ignore[assignment]


if FOLDERS_VARIABLE in os.environ:
    fill(os.environ[FOLDERS_VARIABLE].split(os.pathsep))
