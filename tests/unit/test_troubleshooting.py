"""docs/troubleshooting.md quotes messages that the code really gives."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = [
    quote
    for line in PAGE.splitlines()
    if line.startswith("**")
    for quote in re.findall(r"`([^`]+)`", line)
    if " " in quote and not quote.startswith("omni-server ")
]


@pytest.fixture(scope="module")
def messages() -> list[str]:
    """Every string of the source; those with fields in them as their constant parts."""
    found = [script.read_text() for script in (ROOT / "scripts").iterdir() if script.is_file()]
    for file in [*(ROOT / "omni_server").rglob("*.py"), *(ROOT / "stages").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_messages_are_quoted() -> None:
    assert len(QUOTED) > 20


@pytest.mark.parametrize("quote", QUOTED)
def test_every_part_of_a_quoted_message_is_in_the_code(quote: str, messages: list[str]) -> None:
    for part in (piece.strip() for piece in quote.split("...")):
        assert any(part in message for message in messages), part
