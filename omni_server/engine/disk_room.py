"""Whether a folder takes data: an empty file can be made on a full disk, too."""

import os
import tempfile
from pathlib import Path

_BYTES = 64 * 1024
"""More than any one file holds that vLLM writes at the start, but for compiled code."""


def write_something(folder: Path) -> None:
    """A file of 64 KiB, which is removed again. Raises `OSError`."""
    file, path = tempfile.mkstemp(dir=folder)
    try:
        try:
            data = bytes(_BYTES)
            while data:
                data = data[os.write(file, data) :]
        finally:
            os.close(file)
    finally:
        Path(path).unlink()
