"""scripts/measure: what it makes of results; what it measures takes a GPU and minutes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.scripts.test_load_scripts import SCRIPTS, script

RESULTS = SCRIPTS.parent / "tests" / "data" / "measured"
"""Of a run on an H200, with only the first four requests of each level."""


def page_of(folder: Path, *names: str) -> str:
    for name in names:
        shutil.copy(RESULTS / name, folder / name)
    page: str = script("measure")._page(folder, ["omni-server: ready after 157 s"])
    return page


def test_page_has_the_tables_of_the_benchmarks(tmp_path: Path) -> None:
    page = page_of(tmp_path, "w1.json", "text.json", "text-vllm-serve.json")
    assert page.startswith(
        "- omni-server: ready after 157 s\n\nW1: a short question, 5 s of speech; `bench_serving "
    )
    assert "| 1 | 24 ms | 0.191 s | 0.000 / 0.000 s | 0.157 | 6.3 | 0 of 4 |" in page
    assert "| 64 | 116 ms | 1.777 s | 0.000 / 0.171 s | 0.934 | 67.6 | 0 of 4 |" in page
    assert "| 64 | 181 / 187 ms | 6716 / 7401 (-9%) | 0 of 4 |" in page
    assert "W2" not in page


def test_text_stands_alone_where_no_other_server_was_measured(tmp_path: Path) -> None:
    assert "| 64 | 181 ms | 6716 | 0 of 4 |" in page_of(tmp_path, "text.json")


def test_a_server_that_answered_nothing_has_no_percentage(tmp_path: Path) -> None:
    page_of(tmp_path, "text.json", "text-vllm-serve.json")
    path = tmp_path / "text-vllm-serve.json"
    run = json.loads(path.read_text())
    for level in run["levels"]:
        level["text_tokens_per_s"] = 0.0
    path.write_text(json.dumps(run))
    assert "| 64 | 181 / 187 ms | 6716 / 0 | 0 of 4 |" in script("measure")._page(tmp_path, [])


@pytest.mark.parametrize(
    ("family", "load", "lengths"),
    [
        ("qwen2_5_omni", "w1", ()),
        ("qwen3_omni", "text", ()),
        ("qwen3_omni", "w1", ("--codec-tokens", "63")),
        ("qwen3_omni", "w3", ("--codec-tokens", "875")),
    ],
)
def test_speech_is_as_long_with_each_family(family: str, load: str, lengths: tuple[str, ...]) -> None:
    assert script("measure")._lengths(family, load)[:2] == lengths


def test_what_does_not_start_is_named_with_its_log_and_leaves_a_page(tmp_path: Path) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, SCRIPTS / "measure", "out", "--model", "no-model"),
            *("--stage-config", "qwen2_5_omni.demo-cpu"),
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 1
    assert f"omni-server ended with 2; {tmp_path}/out/server.log ends with" in ended.stderr
    assert (tmp_path / "out" / "README.md").exists()


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
        [sys.executable, SCRIPTS / "measure", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert error in ended.stderr
