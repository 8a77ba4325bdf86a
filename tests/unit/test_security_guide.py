"""docs/security.md against the code: every limit is in its table, with its default and with a test that
exists."""

import ast
import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest

from omni_server.api.config import ApiConfig
from omni_server.cli.main import main
from omni_server.media.limits import MediaLimits

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "security.md").read_text()
TABLE = GUIDE[GUIDE.index("## Limits") : GUIDE.index("## What is not defended")]
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]] for line in TABLE.splitlines() if line.startswith("| `")
]
LIMITING = re.compile(r"max_|_timeout|_entries|_threads|^allowed_")
NO_LIMITS = {"shutdown_timeout_s"}
"""Of the server's end, not of callers."""


def test_every_limit_is_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    told = " ".join(row[0] for row in ROWS)
    for owner in (ApiConfig, MediaLimits):
        names = {field.name for field in fields(owner)} - NO_LIMITS
        limits = {name for name in names if owner is MediaLimits or LIMITING.search(name)}
        assert {name for name in limits if f"`{owner.__name__}.{name}`" not in told} == set()
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    help_text = capsys.readouterr().out
    groups = help_text[help_text.index("\nlimits:") :]
    flags = set(
        re.findall(
            r"^  (--[a-z-]+)", groups[: groups.index("\n\n", groups.index("/v1/realtime:"))], re.MULTILINE
        )
    )
    assert "--realtime-idle-timeout" in flags
    assert {flag for flag in flags if f"`{flag}`" not in told} == set()


@pytest.mark.parametrize("row", ROWS, ids=[row[0][:60] for row in ROWS])
def test_a_row_has_the_default_and_a_test(row: list[str]) -> None:
    limit, default, _, _, test = row
    values: list[object] = []
    for owner, name in re.findall(r"`(ApiConfig|MediaLimits)\.(\w+)`", limit):
        values.append(vars({"ApiConfig": ApiConfig(), "MediaLimits": MediaLimits()}[owner])[name])
    for module, name in re.findall(r"`([\w.]+):(\w+)`", limit):
        values.append(vars(importlib.import_module(module))[name])
    (told,) = re.findall(r"^`([^`]+)`", default)
    assert values
    for value in values:
        assert value == ast.literal_eval(told)
    file, _, name = test.strip("`").partition("::")
    assert re.search(rf"^ *(async )?def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE)
