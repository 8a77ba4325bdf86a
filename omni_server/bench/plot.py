"""A plot of TTFA and underrun by load. Needs matplotlib: the extra `bench`."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from omni_server.bench.results import Percentiles, Run
from omni_server.errors import ConfigError

Target = Literal["ttfa", "underrun"]
Targets = Mapping[Target, Sequence[float]]
"""In seconds, one per load level."""

_INK = "#222222"
_MUTED = "#888888"
_P50 = "#1f6fb4"
_P99 = "#d95f02"


def require_matplotlib() -> None:
    """Raises `ConfigError` if matplotlib is missing: before the load, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib, which the extra 'bench' brings: pip install 'omni-server[bench]'"
        )


def plot(run: Run, targets: Targets, file: Path) -> None:
    """Writes a PNG with evenly spaced load levels."""
    from matplotlib.axes import Axes  # type: ignore[import-not-found, unused-ignore]
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    places = list(range(len(run.levels)))

    def line(
        axes: Axes, percentiles: Sequence[Percentiles | None], which: Literal["p50", "p99"], colour: str
    ) -> None:
        above = which == "p99"
        known = [
            (place, value) for place, value in zip(places, percentiles, strict=True) if value is not None
        ]
        heights = [value.p50 if which == "p50" else value.p99 for _, value in known]
        axes.plot([place for place, _ in known], heights, "o-", color=colour, label=which, markersize=5)
        for (place, _), height in zip(known, heights, strict=True):
            axes.annotate(
                f"{height:.3g}",
                (place, height),
                (0, 6 if above else -6),
                textcoords="offset points",
                ha="center",
                va="bottom" if above else "top",
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5},
                fontsize=8,
                color=colour,
            )

    ttfa = [level.ttfa_s for level in run.levels]
    line(left, ttfa, "p50", _P50)
    line(left, ttfa, "p99", _P99)
    line(right, [level.underrun_s for level in run.levels], "p99", _P99)
    is_closed = run.levels[0].kind == "closed"
    panels: list[tuple[Axes, Target, str, str]] = [
        (left, "ttfa", "Time to first audio", "target (p50)"),
        (right, "underrun", "Underrun", "target (p99)"),
    ]
    for axes, name, title, target in panels:
        if name in targets:
            wanted = targets[name][: len(places)]  # fewer levels than targets after Ctrl-C
            axes.plot(
                places,
                wanted,
                "_",
                color=_INK,
                markersize=26,
                markeredgewidth=1.5,
                label=target,
                clip_on=False,
            )
        axes.set_title(title, loc="left", fontsize=11, color=_INK)
        axes.set_ylabel("seconds")
        axes.set_xlabel("concurrent requests" if is_closed else "requests per second")
        axes.set_xticks(places, [f"{level.load:g}" for level in run.levels])
        axes.set_xlim(-0.4, len(places) - 0.6)
        axes.set_ylim(0, max(axes.get_ylim()[1] * 1.08, 0.01))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize=9)
    figure.suptitle(
        f"{run.workload.name}, {run.server.model}, {run.server.adapter} {run.server.version or ''}, "
        f"{run.date[:10]}",
        fontsize=9,
        color=_MUTED,
    )
    figure.savefig(file, format="png")
