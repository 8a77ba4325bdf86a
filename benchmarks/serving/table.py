"""Formats results as text."""

from collections import Counter
from collections.abc import Sequence

from benchmarks.serving.results import Level, Percentiles, Run

BUSY_CORES = 0.5
"""Above this fraction of a core, the load generator's own delays may distort its measurements."""


def table(run: Run) -> str:
    """Returns one column per load level, then the failures by reason and the load generator's CPU use."""
    rows = [["", *(level.label for level in run.levels)]]
    rows += [[name, *cells] for name, cells in _rows(run)]
    return "\n".join([*_aligned(rows), *_failures(run.levels), *_effort(run.levels)])


def _distributions(level: Level) -> list[tuple[str, str, Percentiles | None]]:
    """Returns name, unit and values in table order."""
    return [
        ("TTFT", "s", level.ttft_s),
        ("TTFA", "s", level.ttfa_s),
        ("RTF", "", level.rtf),
        ("largest gap", "s", level.largest_gap_s),
        ("underrun", "s", level.underrun_s),
        ("preview", "s", level.preview_s),
        ("end to end", "s", level.end_to_end_s),
    ]


def _rows(run: Run) -> list[tuple[str, list[str]]]:
    levels = run.levels
    rows = [
        ("requests", [str(len(level.rows)) for level in levels]),
        ("failures", [str(len(level.failures)) for level in levels]),
    ]
    if any(level.interrupted for level in levels):
        rows.append(("unfinished", [str(level.unfinished) for level in levels]))
    if run.workload.text_tokens:
        rows.append(("prompt tokens p50 (cached)", [_prompt(level) for level in levels]))
    for distributions in zip(*(_distributions(level) for level in levels), strict=True):
        name, unit, _ = distributions[0]
        if any(percentiles is not None for _, _, percentiles in distributions):
            cells = [_spread(percentiles) for _, _, percentiles in distributions]
            rows.append((f"{f'{name} {unit}':15}p50 p90 p99", cells))
    if run.workload.codec_tokens:
        rows.append(("continuous playback", [level.continuous_playback for level in levels]))
        rows.append(("audio s/s", [_number(level.audio_s_per_s) for level in levels]))
    per_s = "images/s" if run.workload.makes_images else "requests/s"
    rows.append((per_s, [_number(level.requests_per_s) for level in levels]))
    if run.workload.text_tokens:
        rows.append(("text tokens/s", [_number(level.text_tokens_per_s) for level in levels]))
    return rows


def _failures(levels: Sequence[Level]) -> list[str]:
    return [
        f"{level.label}: {count} failed: {reason}"
        for level in levels
        for reason, count in Counter(level.failures).most_common()
    ]


def _effort(levels: Sequence[Level]) -> list[str]:
    shares = [
        f"{level.label} {level.client_cores:.0%} (at most {level.peak_in_flight} at once)" for level in levels
    ]
    lines = [f"load generator, share of a core: {', '.join(shares)}"]
    busy = [level.label for level in levels if level.client_cores > BUSY_CORES and level.requests_per_s]
    if busy:
        lines.append(
            f"WARNING: the load generator used more than {BUSY_CORES:.0%} of a core ({', '.join(busy)}): "
            "it may itself have delayed what it measured"
        )
    return lines


def _prompt(level: Level) -> str:
    if level.prompt_tokens is None:
        return "-"
    cached = f" ({level.cached_tokens.p50:.0f})" if level.cached_tokens is not None else ""
    return f"{level.prompt_tokens.p50:.0f}{cached}"


def _spread(percentiles: Percentiles | None) -> str:
    if percentiles is None:
        return "-"
    return " ".join(_number(value) for value in (percentiles.p50, percentiles.p90, percentiles.p99))


def _number(value: float) -> str:
    if value == 0:
        return "0"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        "  ".join(
            [name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, others, strict=True))]
        )
        for name, *cells in rows
    ]
