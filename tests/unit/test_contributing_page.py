"""CONTRIBUTING.md against the code: the modules that import vLLM's internals."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def test_page_lists_the_modules_that_import_from_below_vllm_and_no_other() -> None:
    sources = [path for package in ("omni_server", "stages") for path in (ROOT / package).rglob("*.py")]
    using = {
        str(path.relative_to(ROOT))
        for path in sources
        if any(module.startswith("vllm.") for module in imported(path))
    }
    rows = re.findall(r"^\| (`.*?`) \|", PAGE.split("## vLLM's internals")[1].split("\n## ")[0], re.MULTILINE)
    told = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert set(told) == using
    assert len(told) == len(using)
