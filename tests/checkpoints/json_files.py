"""JSON files of a demo checkpoint."""

import json
from pathlib import Path

Json = dict[str, object]
"""One JSON object to write to a file."""


def dump(path: Path, content: object, *, indent: int | None = 2, ensure_ascii: bool = True) -> None:
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=ensure_ascii) + "\n", encoding="utf-8")
