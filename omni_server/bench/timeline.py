"""One spoken request, stage by stage, as a picture: drawn from what the server logs with `--log-level debug`."""

import re
from pathlib import Path

import msgspec

from omni_server.errors import ConfigError
from omni_server.types import StageTimes

_LINE = re.compile(r"request (?P<id>\S+): times (?P<times>\{.*\})")
_THINKER, _TALKER, _WAITING, _CODE2WAV, _SOUND = "#1f6fb4", "#1b9e77", "#dddddd", "#d95f02", "#7570b3"
_INK = "#222222"


def read_times(log: Path) -> dict[str, StageTimes]:
    """Times of every spoken request in a server's log, by request id, in the order in which they ended."""
    times = {}
    with log.open(errors="replace") as lines:
        for line in lines:
            if (match := _LINE.search(line)) is not None:
                found = msgspec.json.decode(match["times"], type=StageTimes)
                if found.windows:
                    times[match["id"]] = found
    if not times:
        raise ConfigError(f"{log} has no times of a spoken request; they are logged with --log-level debug")
    return times


def plot_timeline(times: StageTimes, durations_s: list[float], title: str, file: Path) -> None:
    """Writes a PNG. `durations_s`: how long the sound of each window lasts; may be shorter than the windows."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    figure = Figure(figsize=(10, 2.9), dpi=150, layout="constrained")
    axes = figure.subplots()
    rows = ["thinker", "talker", "code2wav", "player"]

    def bar(row: str, start_s: float, end_s: float, colour: str, label: str = "") -> None:
        axes.barh(rows.index(row), 1000 * (end_s - start_s), left=1000 * start_s, height=0.55, color=colour)
        if label:
            axes.text(
                500 * (start_s + end_s), rows.index(row), label, ha="center", va="center", fontsize=7, color="white"
            )

    if times.first_text_s is not None and times.last_text_s is not None:
        bar("thinker", 0, times.first_text_s, _WAITING)
        bar("thinker", times.first_text_s, times.last_text_s, _THINKER, "text tokens")
    if times.talker_opened_s is not None and times.last_codes_s is not None:
        bar("talker", times.talker_opened_s, times.last_codes_s, _TALKER, "codec tokens")
    for number, window in enumerate(times.windows, 1):
        bar("code2wav", window.ready_s, window.sent_s, _WAITING)
        bar("code2wav", window.sent_s, window.computed_s, _CODE2WAV, str(number))
    end_s = max(window.computed_s for window in times.windows)
    if times.first_audio_s is not None:
        axes.axvline(1000 * times.first_audio_s, color=_INK, linewidth=0.8, linestyle="--")
        axes.annotate(
            f"first audio {1000 * times.first_audio_s:.0f} ms",
            (1000 * times.first_audio_s, -0.5),
            (4, 2),
            textcoords="offset points",
            fontsize=8,
            color=_INK,
        )
        start_s = times.first_audio_s
        for number, duration_s in enumerate(durations_s, 1):
            bar("player", start_s + 0.002, min(start_s + duration_s, 1.1 * end_s), _SOUND, str(number))
            start_s += duration_s
            if start_s >= 1.1 * end_s:
                break
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlim(0, 1100 * end_s)
    axes.set_xlabel("milliseconds since the request")
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    figure.savefig(file, format="png")
