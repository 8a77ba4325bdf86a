"""Takes out of a report what says whose machine it was made on."""

import re
import socket
from collections.abc import Iterable
from pathlib import Path

_FOLDERS = re.compile(r"(?<![\w./~])(?:~\w*)?/(?!/)(?:[^\s/\"'`|,;:]+/)*(?=[^\s/])")
"""What stands before the last part of an absolute path."""


def without_personal_data(text: str, folders: Iterable[Path]) -> str:
    """`text` with only the last parts of absolute paths, and without this machine's name. `folders` may occur
    in it, whatever signs are in their names."""
    for folder in sorted({*folders, Path.home(), Path.cwd()}, key=lambda path: -len(str(path))):
        if len(folder.parts) > 1:
            text = text.replace(f"{folder}/", "").replace(str(folder), folder.name)
    text = _FOLDERS.sub("", text.replace("file://", ""))
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", text)
