"""Commands on the pages, and what the pages say that they print."""

import re
from dataclasses import dataclass
from pathlib import Path

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A command or program."""

    language: str
    text: str
    printed: str | None
    """The fenced block that follows with no prose between; None if there is none."""


def blocks(page: Path) -> list[Block]:
    fenced = list(_FENCED.finditer(page.read_text()))
    found = []
    for index, (language, text) in enumerate(match.groups() for match in fenced):
        if language not in ("bash", "python"):
            continue
        printed = None
        if index + 1 < len(fenced) and fenced[index + 1].start() == fenced[index].end() + 1:
            next_language, next_text = fenced[index + 1].groups()
            printed = next_text if next_language in ("", "json") else None
        found.append(Block(language, text, printed))
    return found


def is_shown_by(printed: str, output: str) -> bool:
    """Whether the page's `printed` is the `output`, of which `...` leaves anything out. White space may
    differ."""
    parts = (r"\s*".join(map(re.escape, part.split())) for part in printed.split("..."))
    pattern = r"\s*[\s\S]*?\s*".join(parts)
    return re.fullmatch(pattern, output.strip()) is not None
