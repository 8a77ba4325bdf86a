#!/usr/bin/env python3
"""Condense what `scripts/bench_serving --json` wrote to one CSV line per load level: benchmarks/results.csv
is made so."""

import argparse
import csv
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.serving.results import Level, Percentiles, Run, load_run

FIELDS = [
    *(
        "run",
        "file",
        "date",
        "server",
        "version",
        "workload",
        "output",
        "callers",
        "requests",
        "failures",
        "stalled",
    ),
    *(
        "ttft_p50_s",
        "ttft_p99_s",
        "ttfa_p50_s",
        "ttfa_p90_s",
        "ttfa_p99_s",
        "underrun_p50_s",
        "underrun_p99_s",
    ),
    *("underrun_max_s", "rtf_p50", "rtf_p99", "end_to_end_p50_s", "end_to_end_p99_s", "largest_gap_p50_s"),
    *(
        "largest_gap_p99_s",
        "preview_p50_s",
        "preview_p99_s",
        "prompt_tokens_p50",
        "audio_s_per_s",
        "text_tokens_per_s",
        "requests_per_s",
        "wall_s",
    ),
    "command",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="has a folder for each run, with the JSON files in it")
    args = parser.parse_args()
    write(args.folder, sys.stdout)


def write(folder: Path, out: IO[str]) -> None:
    writer = csv.DictWriter(out, FIELDS, lineterminator="\n")
    writer.writeheader()
    for file in sorted(folder.glob("*/*.json")):
        writer.writerows(lines(file, load_run(file)))


def lines(file: Path, run: Run) -> Iterable[dict[str, str]]:
    for level in run.levels:
        known = {
            "run": file.parent.name,
            "file": file.stem,
            "date": run.date[:19] + "Z",
            "server": run.server.adapter,
            "version": run.server.version or "",
            "workload": run.workload.name,
            "output": run.workload.modalities,
            "command": run.command,
        }
        yield known | figures(level)


def figures(level: Level) -> dict[str, str]:
    stalls = [row.underrun_s for row in level.rows if row.stalls]
    return {
        "callers": f"{level.load:g}",
        "requests": str(len(level.rows)),
        "failures": str(len(level.failures)),
        "stalled": str(len(stalls)),
        "ttft_p50_s": seconds(level.ttft_s, "p50"),
        "ttft_p99_s": seconds(level.ttft_s, "p99"),
        "ttfa_p50_s": seconds(level.ttfa_s, "p50"),
        "ttfa_p90_s": seconds(level.ttfa_s, "p90"),
        "ttfa_p99_s": seconds(level.ttfa_s, "p99"),
        "underrun_p50_s": seconds(level.underrun_s, "p50"),
        "underrun_p99_s": seconds(level.underrun_s, "p99"),
        "underrun_max_s": f"{max(stalls, default=0.0):.4f}",
        "rtf_p50": seconds(level.rtf, "p50"),
        "rtf_p99": seconds(level.rtf, "p99"),
        "end_to_end_p50_s": seconds(level.end_to_end_s, "p50"),
        "end_to_end_p99_s": seconds(level.end_to_end_s, "p99"),
        "largest_gap_p50_s": seconds(level.largest_gap_s, "p50"),
        "largest_gap_p99_s": seconds(level.largest_gap_s, "p99"),
        "preview_p50_s": seconds(level.preview_s, "p50"),
        "preview_p99_s": seconds(level.preview_s, "p99"),
        "prompt_tokens_p50": "" if level.prompt_tokens is None else f"{level.prompt_tokens.p50:g}",
        "audio_s_per_s": f"{level.audio_s_per_s:.2f}",
        "text_tokens_per_s": f"{level.text_tokens_per_s:.1f}",
        "requests_per_s": f"{level.requests_per_s:.3f}",
        "wall_s": f"{level.wall_s:.3f}",
    }


def seconds(values: Percentiles | None, which: str) -> str:
    return "" if values is None else f"{getattr(values, which):.4f}"


if __name__ == "__main__":
    main()
