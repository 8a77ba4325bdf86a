"""Formats results as text."""

from collections import Counter
from collections.abc import Sequence

from omni_server.bench.results import Level, Percentiles, Run
from omni_server.bench.workload import Workload

BUSY_CORES = 0.5
"""Above this fraction of a core, the load generator's own delays may distort its measurements."""


def table(run: Run) -> str:
    """Returns one column per load level, then the failures by reason and the load generator's CPU use."""
    rows = [["", *(level.label for level in run.levels)]]
    rows += [[name, *cells] for name, cells in _rows(run)]
    textless = _textless(run.levels) if run.workload.text_tokens else []
    return "\n".join([*_aligned(rows), *_failures(run.levels), *textless, *_effort(run.levels)])


def summary(level: Level) -> str:
    """Returns the medians and throughput of a load level in one line."""
    medians = [
        f"{name} {_number(percentiles.p50)}{' s' if unit else ''}"
        for name, unit, percentiles in _distributions(level)
        if percentiles is not None and name != "largest gap"
    ]
    parts = [f"median {', '.join(medians)}"] if medians else []
    parts += [f"{_number(level.audio_s_per_s)} audio s/s"] if level.audio_s_per_s else []
    parts.append(f"{_number(level.requests_per_s)} requests/s")
    return f"{level.label}: {'; '.join(parts)}"


def comparison(run: Run, earlier: Run) -> str:
    """Compares the load levels that both runs have."""
    lines = [f"compared with {earlier.date}: {earlier.server.adapter}, {earlier.command}"]
    now_asked, then_asked = run.workload.model_dump(), earlier.workload.model_dump()
    different = [
        f"{name} {now_asked[name]}, earlier {then_asked[name]}"
        for name in now_asked
        if now_asked[name] != then_asked[name]
    ]
    if different:
        lines.append(f"WARNING: not the same was asked: {'; '.join(different)}")
    before = {level.label: level for level in earlier.levels}
    for level in run.levels:
        if level.label not in before:
            lines.append(f"{level.label}: not in the earlier run")
            continue
        rows = [[level.label, "now", "earlier", "change"]]
        for (name, now), (_, then) in zip(_figures(level), _figures(before[level.label]), strict=True):
            if now is None and then is None:
                continue
            change = f"{now / then - 1:+.1%}" if now is not None and then else "-"
            rows.append([name, _number(now), _number(then), change])
        lines += ["", *_aligned(rows)]
    return "\n".join(lines)


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


def _has(workload: Workload, name: str) -> bool:
    """Whether the answers have what the distribution called `name` is about."""
    match name:
        case "end to end":
            return True
        case "preview":
            return workload.partial_images > 0
        case "TTFT":
            return workload.text_tokens > 0
        case _:
            return workload.codec_tokens > 0


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
        if _has(run.workload, name):
            cells = [_spread(percentiles) for _, _, percentiles in distributions]
            rows.append((f"{f'{name} {unit}':15}p50 p90 p99", cells))
    if run.workload.codec_tokens:
        rows.append(("audio s/s", [_number(level.audio_s_per_s) for level in levels]))
    per_s = "images/s" if run.workload.makes_images else "requests/s"
    rows.append((per_s, [_number(level.requests_per_s) for level in levels]))
    if run.workload.text_tokens:
        rows.append(("text tokens/s", [_number(level.text_tokens_per_s) for level in levels]))
    return rows


def _figures(level: Level) -> list[tuple[str, float | None]]:
    figures: list[tuple[str, float | None]] = [("failures", len(level.failures))]
    for name, unit, percentiles in _distributions(level):
        title = f"{name} {unit}".rstrip()
        figures.append((f"{title} p50", percentiles.p50 if percentiles is not None else None))
        figures.append((f"{title} p99", percentiles.p99 if percentiles is not None else None))
    return [
        *figures,
        ("audio s/s", level.audio_s_per_s),
        ("requests/s", level.requests_per_s),
        ("text tokens/s", level.text_tokens_per_s),
    ]


def _failures(levels: Sequence[Level]) -> list[str]:
    return [
        f"{level.label}: {count} failed: {reason}"
        for level in levels
        for reason, count in Counter(level.failures).most_common()
    ]


def _textless(levels: Sequence[Level]) -> list[str]:
    """Answers may have tokens without text, such as special tokens or halves of a character."""
    return [
        f"{level.label}: {count} answers without any text; their TTFT is not known"
        for level in levels
        if (count := sum(row.failure is None and row.ttft_s is None for row in level.rows))
    ]


def _effort(levels: Sequence[Level]) -> list[str]:
    lines = [
        "load generator, share of a core: "
        + ", ".join(
            f"{level.label} {level.client_cores:.0%} (at most {level.peak_in_flight} at once)"
            for level in levels
        )
    ]
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


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    ]
