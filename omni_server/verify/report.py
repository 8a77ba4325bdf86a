"""The report of a comparison, as a table for the terminal and as a Markdown file."""

import math
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from omni_server.config.stage_config import StageConfig
from omni_server.errors import ConfigError
from omni_server.verify.compare import MIN_SNR_DB, NEAR_TIE, CaseResult, Precision, TokenMatch

_LEGEND = """\
- **text**, **codes**: how many of this server's tokens are those of {reference}. Both are greedy.
  {reference} is led along this server's answer and says at each step which token it prefers: without a
  difference its own answer is the same, and behind one the comparison goes on. So codes are those of one text.
- **near**: {reference} prefers another token, but the logits of the two are closer than {near:.2g} of the
  step's largest logit, which rounding in {dtype} explains. Near ties do not fail a case.
- **SNR**: the same codes, decoded from the same noise in one window, against the waveform of
  {reference}.{least}
- **streamed**: what a caller hears, against the same waveform. Windows see less of what surrounds
  them; this is for information and fails nothing.
- A dash stands for what does not exist or was not compared."""

_FOLDERS = re.compile(r"(?<![\w./~])(?:~\w*)?/(?!/)(?:[^\s/\"'`|,;:]+/)*(?=[^\s/])")
"""Matches all but the last part of an absolute path."""


@dataclass(frozen=True)
class Report:
    model: str
    """Hub id, or the last part of the folder's path."""
    facts: tuple[tuple[str, str], ...]
    """Names and values: software, hardware and checkpoint."""
    stage_config_name: str | None
    """None if made for the model and this machine."""
    stage_config: StageConfig
    precision: Precision
    reference: str
    reference_device: str
    results: tuple[CaseResult, ...]
    left_out: tuple[str, ...]
    """What no case compared, each with its reason."""
    folders: tuple[Path, ...]
    """Folders with private names."""

    @property
    def agrees(self) -> bool:
        return all(result.agrees for result in self.results)


@contextmanager
def new_report_file(wanted: Path | None, model: str) -> Iterator[Path]:
    """Creates the file for a report before the work, which takes minutes, and removes it if the block fails.

    `wanted` must not exist yet. Without it, the file is omni-server-verify-MODEL.md in the working directory
    or, if that exists, the first free name with -2, -3 and so on. Raises `ConfigError` if it cannot be
    written.
    """
    name = re.sub(r"[^\w.-]+", "-", Path(model).expanduser().resolve().name) or "model"
    path, number = wanted or Path(f"omni-server-verify-{name}.md"), 1
    while wanted is None and path.exists():
        number += 1
        path = Path(f"omni-server-verify-{name}-{number}.md")
    try:
        path.touch(exist_ok=False)
    except FileExistsError as error:
        raise ConfigError(f"--report {path} exists; give another name, or remove it") from error
    except OSError as error:
        raise ConfigError(f"--report: {path} cannot be written: {error.strerror}") from error
    try:
        yield path
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def as_table(report: Report) -> str:
    """For a terminal: one line per case, the problems, and the verdict."""
    rows = _rows(report)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = ["  ".join(row).rstrip() for row in padded]
    wrong = _problems(report) + _failures(report)
    return "\n".join([*lines, "", *wrong, *([""] if wrong else []), verdict(report)])


def verdict(report: Report) -> str:
    """One line."""
    num_cases = len(report.results)
    tokens = sum(result.num_tokens for result in report.results)
    near_ties = [tie for result in report.results for tie in result.near_ties]
    beside = f"{tokens} tokens, no near ties"
    if near_ties:
        widest = max(tie.margin / tie.largest if tie.largest else 0.0 for tie in near_ties)
        beside = f"{tokens} tokens, {len(near_ties)} near ties of at most {widest:.2g} of the largest logit"
    if report.agrees:
        return f"This server and {report.reference} agree in all {num_cases} cases ({beside})."
    different = [result.case.name for result in report.results if result.problems]
    failed = [result.case.name for result in report.results if result.failure is not None]
    sentences = []
    if different:
        names = "; ".join(different)
        sentences.append(
            f"This server and {report.reference} DIFFER in {len(different)} of {num_cases} cases: {names}."
        )
    if failed:
        sentences.append(f"NOT COMPARED are {len(failed)} of {num_cases} cases: {'; '.join(failed)}.")
    return " ".join(sentences)


def as_markdown(report: Report) -> str:
    """Self-contained, without paths, host name or environment."""
    config = report.stage_config.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    precision = report.precision
    least = ""
    if precision.decoder is not None:
        least = f" With {precision.decoder}, at least {MIN_SNR_DB[precision.decoder]:g} dB are expected."
    near = NEAR_TIE[precision.language_models]
    legend = _LEGEND.format(
        reference=report.reference, near=near, dtype=precision.language_models, least=least
    )
    header, *rows = _rows(report)
    lines = [
        f"# omni-server verify: {report.model}",
        "",
        f"**{verdict(report)}**",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in report.facts),
        f"| stage config | {report.stage_config_name or 'made for this model and machine'}, below |",
        f"| precision here | {precision.language_models}, decoder {precision.decoder or 'not compared'} |",
        f"| {report.reference} "
        f"| {precision.language_models}, decoder float32, on {report.reference_device} |",
        "",
        "## Cases",
        "",
        _markdown_row(header),
        "|" + "---|" * len(header),
        *map(_markdown_row, rows),
        "",
        legend,
        "",
    ]
    if problems := _problems(report):
        lines += ["## What differs", "", *(f"- {problem}" for problem in problems), ""]
    lines += ["## What was not compared", ""]
    not_compared = (*_failures(report), *_left_out_of_cases(report), *report.left_out)
    lines += [f"- {reason}" for reason in not_compared]
    dumped = without_personal_data(yaml.safe_dump(config, sort_keys=False), report.folders)
    lines += ["", "## Stage config", "", "```yaml", dumped.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _rows(report: Report) -> list[tuple[str, ...]]:
    """The column names, then one row per case."""
    cells = [_cells(result) for result in report.results]
    return [tuple(cells[0]), *(tuple(row.values()) for row in cells)]


def _cells(result: CaseResult) -> dict[str, str]:
    case = result.case
    return {
        "prompt": case.prompt.name,
        "voice": case.voice or "-",
        "verdict": _verdict(result),
        "text": "given" if case.prompt.text is not None else _matched(result.text),
        "codes": _matched(result.codes),
        "SNR dB": _decibels(result.snr_db),
        "streamed dB": _decibels(result.streamed_snr_db),
    }


def _verdict(result: CaseResult) -> str:
    if result.failure is not None:
        return "NOT COMPARED"
    if result.problems:
        return "DIFFERS"
    return "near ties" if result.near_ties else "equal"


def _matched(match: TokenMatch | None) -> str:
    if match is None:
        return "-"
    num_equal = max(0, match.num_tokens - len(match.differences) - len(match.near_ties))
    near = f", {len(match.near_ties)} near" if match.near_ties else ""
    return f"{num_equal} of {match.num_tokens}{near}"


def _decibels(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return "equal" if value == math.inf else f"{value:.1f}"


def _problems(report: Report) -> list[str]:
    return [
        without_personal_data(f"{result.case.name}: {problem}", report.folders)
        for result in report.results
        for problem in result.problems
    ]


def _failures(report: Report) -> list[str]:
    return [
        without_personal_data(f"{result.case.name}: {result.failure}", report.folders)
        for result in report.results
        if result.failure is not None
    ]


def _left_out_of_cases(report: Report) -> list[str]:
    """Lists each reason once, with its cases."""
    reasons = dict.fromkeys(reason for result in report.results for reason in result.left_out)
    return [
        f"{reason} ({'; '.join(result.case.name for result in report.results if reason in result.left_out)})"
        for reason in reasons
    ]


def _markdown_row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def without_personal_data(text: str, folders: Iterable[Path]) -> str:
    """Removes what identifies the machine from `text`: the host name, and all but the last part of absolute
    paths. `folders` are removed whatever characters their names contain."""
    for folder in sorted({*folders, Path.home(), Path.cwd()}, key=lambda path: -len(str(path))):
        if len(folder.parts) > 1:
            text = text.replace(f"{folder}/", "").replace(str(folder), folder.name)
    text = _FOLDERS.sub("", text.replace("file://", ""))
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", text)
