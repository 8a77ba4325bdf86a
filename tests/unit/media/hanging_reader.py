"""A reader that never ends, in place of the real ones, and the processes that it has."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_server.media import audio, image, video

_BODY = "import time\ndef read(file, output, arguments): time.sleep(600)\n"


def hang(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Makes every file take forever that is read in a process. Returns the reader."""
    reader = folder / "hanging.py"
    reader.write_text(_BODY)
    for module in (audio, image, video):
        monkeypatch.setattr(module, "_MODULE", reader)
    return reader


def num_reading(reader: Path) -> int:
    """Its processes that have a file: all but the program and the one that waits for the next file."""
    return max(len(list(_processes(reader))) - 2, 0)


def wait_until_reading(reader: Path, number: int) -> None:
    for _ in range(3_000):
        if num_reading(reader) == number:
            return
        time.sleep(0.01)
    raise AssertionError(f"{num_reading(reader)} processes read, not {number}")


def _processes(reader: Path) -> Iterator[int]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                command_line = Path(entry.path, "cmdline").read_bytes()
            except OSError:  # it has ended
                continue
            if str(reader).encode() in command_line:
                yield int(entry.name)
