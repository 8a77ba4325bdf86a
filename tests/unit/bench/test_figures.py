"""The figures in benchmarks/: the CSV files, what makes them, and what the pages quote of them."""

import csv
import io
import re
from pathlib import Path

import pytest

from benchmarks import plot_comparison, summarize
from tests.unit.bench.rows import level, row, run

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "benchmarks" / "README.md").read_text()


def read(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((ROOT / "benchmarks" / name).read_text())))


def test_a_run_is_condensed_to_one_line_per_level(tmp_path: Path) -> None:
    rows = [row(end_to_end_s=2.0, samples=120_000), row(failure="HTTP 500")]
    measured = run(level(2, rows), level(4, [row()] * 4))
    (tmp_path / "today").mkdir()
    (tmp_path / "today" / "w1.json").write_text(measured.model_dump_json())
    out = io.StringIO()

    summarize.write(tmp_path, out)

    first, second = csv.DictReader(io.StringIO(out.getvalue()))
    assert (first["run"], first["file"], first["callers"]) == ("today", "w1", "2")
    assert (first["requests"], first["failures"], first["rtf_p50"]) == ("2", "1", "0.4000")
    assert (second["callers"], second["requests"], second["failures"]) == ("4", "4", "0")
    assert first["command"] == measured.command


def test_the_file_of_results_has_the_columns_that_the_script_writes() -> None:
    assert list(read("results.csv")[0]) == summarize.FIELDS


def test_every_run_that_the_page_names_has_results() -> None:
    named = set(re.findall(r"\b20\d\d-\d\d-\d\d-h200(?:-\w+)*", PAGE))
    assert len(named) > 8
    assert named == {line["run"] for line in read("results.csv")}


@pytest.mark.parametrize(
    ("column", "place", "factor", "digits"),
    [("ttft_p50_s", 1, 1000, 0), ("ttfa_p50_s", 2, 1, 3), ("rtf_p50", 3, 1, 3), ("audio_s_per_s", 4, 1, 1)],
)
def test_the_table_beside_vllm_omni_has_the_measured_figures(
    column: str, place: int, factor: float, digits: int
) -> None:
    ours = {
        line["callers"]: float(line[column])
        for line in read("results.csv")
        if (line["run"], line["file"]) == (plot_comparison.RUN, plot_comparison.FILE)
    }
    theirs = {line["callers"]: float(line[column]) for line in read("vllm_omni.csv")}
    section = PAGE.split("beside vLLM-Omni\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\| (\d+) \|.*$", section, re.MULTILINE)
    assert lines == list(ours)
    for line in re.findall(r"^\| \d+ \|.*$", section, re.MULTILINE):
        callers, cell = line.split("|")[1].strip(), line.split("|")[place + 1]
        our_figure, their_figure = cell.split("/")
        assert re.findall(r"[\d.]+", our_figure) == [f"{ours[callers] * factor:.{digits}f}"]
        if callers in theirs:
            assert float(re.findall(r"[\d.]+", their_figure)[0]) == pytest.approx(theirs[callers] * factor)
        else:
            assert "not measured" in their_figure


def test_the_chart_is_drawn_from_the_figures() -> None:
    assert plot_comparison.PICTURE.read_text() == plot_comparison.picture(), (
        "run benchmarks/plot_comparison.py"
    )
