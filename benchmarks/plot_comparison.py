#!/usr/bin/env python3
"""Draw docs/pictures/speed.svg from benchmarks/results.csv and benchmarks/vllm_omni.csv."""

import argparse
import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parent / "docs" / "pictures" / "speed.svg"
RUN, FILE = "2026-11-23-h200-forecast", "w1"
CALLERS = (1, 4, 16, 64)

WIDTH, HEIGHT = 800, 400
TOP, BOTTOM = 96, 300
PANEL_WIDTH = 370
BAR = 30

Figures = Mapping[int, float]
"""By the number of callers."""

NOTES = (
    "Medians; each caller sends its next question when the last one is answered; 64 text and 250 codec tokens,",
    "dummy weights. As shipped, vLLM-Omni runs one request per stage at a time, without CUDA graphs, and sends the"
    " audio whole.",
)

STYLE = """
    text { font: 13px Helvetica, Arial, sans-serif; fill: #24292f; }
    .title { font-size: 15px; font-weight: bold; }
    .small { font-size: 11px; fill: #57606a; }
    .ours { fill: #1f6fb4; }
    .theirs { fill: #c4570a; }
    .axis { stroke: #8c959f; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; }
      .small { fill: #9da7b3; }
      .ours { fill: #58a6ff; }
      .theirs { fill: #f0883e; }
    }"""


@dataclass(frozen=True)
class Panel:
    left: int
    title: str
    ours: Figures
    theirs: Figures
    digits: Mapping[str, int]
    """Decimal places of the labels of each server's bars."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PICTURE, help="default: docs/pictures/speed.svg")
    args = parser.parse_args()
    args.out.write_text(picture())


def picture() -> str:
    ours = [
        row
        for row in read("results.csv")
        if (row["run"], row["file"]) == (RUN, FILE) and int(row["callers"]) in CALLERS
    ]
    theirs = read("vllm_omni.csv")
    panels = [
        Panel(
            20,
            "Seconds until the first audio (less is better)",
            column(ours, "ttfa_p50_s"),
            column(theirs, "ttfa_p50_s"),
            {"ours": 2, "theirs": 1},
        ),
        Panel(
            20 + PANEL_WIDTH + 30,
            "Seconds of audio per second (more is better)",
            column(ours, "audio_s_per_s"),
            column(theirs, "audio_s_per_s"),
            {"ours": 1, "theirs": 2},
        ),
    ]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        ' aria-labelledby="title description">',
        '  <title id="title">omni-server and vLLM-Omni on one NVIDIA H200</title>',
        f'  <desc id="description">{description(panels)}</desc>',
        f"  <style>{STYLE}\n  </style>",
        '  <text class="title" x="20" y="24">Spoken answers of 5 s, Qwen2.5-Omni-7B sizes, one NVIDIA H200</text>',
        '  <rect class="ours" x="20" y="38" width="12" height="12"/>',
        f'  <text x="38" y="49">omni-server 0.1.0 ({day(ours[0]["date"])})</text>',
        '  <rect class="theirs" x="250" y="38" width="12" height="12"/>',
        f'  <text x="268" y="49">vLLM-Omni {theirs[0]["version"]}, its shipped settings ({theirs[0]["date"]})</text>',
        *(line for panel in panels for line in drawn(panel)),
        *(
            f'  <text class="small" x="20" y="{y}">{line}</text>'
            for y, line in zip((364, 380), NOTES, strict=True)
        ),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def read(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(newline="") as file:
        return list(csv.DictReader(file))


def column(rows: list[dict[str, str]], name: str) -> Figures:
    return {int(row["callers"]): float(row[name]) for row in rows}


def day(date: str) -> str:
    return date[:10]


def unit(callers: int) -> str:
    return "caller" if callers == 1 else "callers"


def description(panels: list[Panel]) -> str:
    return ". ".join(
        f"{panel.title}: "
        + "; ".join(
            f"{callers} {unit(callers)}: omni-server {label(panel, 'ours', callers)}, vLLM-Omni "
            + (label(panel, "theirs", callers) if callers in panel.theirs else "not measured")
            for callers in CALLERS
        )
        for panel in panels
    )


def label(panel: Panel, server: str, callers: int) -> str:
    figures = panel.ours if server == "ours" else panel.theirs
    return f"{figures[callers]:.{panel.digits[server]}f}"


def drawn(panel: Panel) -> list[str]:
    most = max([*panel.ours.values(), *panel.theirs.values()])
    scale = (BOTTOM - TOP) / most
    step = PANEL_WIDTH / len(CALLERS)
    lines = [f'  <text x="{panel.left}" y="{TOP - 22}">{panel.title}</text>']
    for number, callers in enumerate(CALLERS):
        middle = panel.left + step * (number + 0.5)
        lines += bar(panel, "ours", callers, middle - BAR - 2, scale)
        if callers in panel.theirs:
            lines += bar(panel, "theirs", callers, middle + 2, scale)
        else:
            x = middle + 2 + BAR / 2
            lines += [
                f'  <text class="small" x="{x:g}" y="{BOTTOM - 18}" text-anchor="middle">not</text>',
                f'  <text class="small" x="{x:g}" y="{BOTTOM - 6}" text-anchor="middle">meas.</text>',
            ]
        place = f'x="{middle:g}" y="{BOTTOM + 20}" text-anchor="middle"'
        lines.append(f"  <text {place}>{callers} {unit(callers)}</text>")
    lines.append(
        f'  <line class="axis" x1="{panel.left}" y1="{BOTTOM}" x2="{panel.left + PANEL_WIDTH}" y2="{BOTTOM}"/>'
    )
    return lines


def bar(panel: Panel, server: str, callers: int, x: float, scale: float) -> list[str]:
    height = (panel.ours if server == "ours" else panel.theirs)[callers] * scale
    return [
        f'  <rect class="{server}" x="{x:g}" y="{BOTTOM - height:.1f}" width="{BAR}" height="{height:.1f}"/>',
        f'  <text x="{x + BAR / 2:g}" y="{BOTTOM - height - 5:.1f}" text-anchor="middle">'
        f"{label(panel, server, callers)}</text>",
    ]


if __name__ == "__main__":
    main()
