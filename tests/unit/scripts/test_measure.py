"""scripts/measure: what it makes of results; what it measures takes a GPU and minutes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.scripts.test_load_scripts import SCRIPTS, script

RESULTS = SCRIPTS.parent / "benchmarks" / "results" / "2026-11-22-h200-busy-windows"


def page_of(folder: Path, *names: str) -> str:
    for name in names:
        shutil.copy(RESULTS / name, folder / name)
    page: str = script("measure")._page(folder, ["omni-server: ready after 157 s"])
    return page


def test_page_has_the_tables_of_the_benchmarks(tmp_path: Path) -> None:
    page = page_of(tmp_path, "w1.json", "text.json", "text-vllm-serve.json")
    assert page.startswith("- omni-server: ready after 157 s\n\nW1: a short question, 5 s of speech; `bench_serving ")
    assert "| 1 | 24 ms | 0.191 s | 0.000 / 0.000 s | 0.157 | 6.3 | 0 of 4 |" in page
    assert "| 64 | 116 ms | 1.777 s | 0.000 / 0.171 s | 0.934 | 67.6 | 0 of 256 |" in page
    assert "| 64 | 181 / 187 ms | 6716 / 7401 (-9%) | 0 of 512 |" in page
    assert "W2" not in page


def test_text_stands_alone_where_no_other_server_was_measured(tmp_path: Path) -> None:
    assert "| 64 | 181 ms | 6716 | 0 of 512 |" in page_of(tmp_path, "text.json")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((".",), ". exists"),
        (("new", "--loads", "w1,w4"), "one or more of w1, text, w2, w3, not w1,w4"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    arguments: tuple[str, ...], error: str, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, SCRIPTS / "measure", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert error in ended.stderr
