"""A check's findings, as text for people and as JSON for programs."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

from pydantic import Field, TypeAdapter

from omni_server.errors import ConfigError

_T = TypeVar("_T")
Unreported = Annotated[_T, Field(exclude=True)]
"""What the JSON leaves out."""

Severity = Literal["error", "warning", "unknown"]
Area = Literal["files", "stage config", "memory", "shared memory", "installation"]

_COLUMNS = "requests: max_num_seqs. context: max_model_len. tokens: that the KV cache has room for."
_ESTIMATED = (
    "~ estimated, from runs on an H200: activations, and the part of the reserve that is not the server's "
    "own. All\n"
    "  else is computed from the checkpoint's config and headers; the KV cache is what is left of the share."
)
_ESTIMATED_CPU = (
    "~ estimated: activations, and 0.6 GB for each process. All else is computed from the checkpoint's "
    "config and\n"
    "  headers."
)


@dataclass(frozen=True)
class Finding:
    """Something to change; the message names the file, the field or the flag."""

    severity: Severity
    """`error`: the model does not fit. `warning`: it does, but the server may not start or run as wanted.
    `unknown`: whether it fits cannot be determined."""
    area: Area
    message: str


@dataclass(frozen=True)
class StageMemory:
    """Bytes that one replica of a stage uses of one device, or of the machine's memory on a CPU."""

    name: str
    """Of `omni_server.metrics.replica_name`."""
    devices: tuple[int, ...]
    """Empty on a CPU."""
    share: int | None
    """`gpu_memory_utilization` of the device; None on a CPU."""
    weights: int
    state: int
    """State of streams between windows."""
    activations: int
    """Estimated."""
    reserve: int
    """What the server itself reserves on a GPU, and estimates of a process's other memory."""
    kv_cache: int | None
    """The remainder, or `kv_cache_memory_bytes`; None for a stage without KV cache. May be negative."""
    kv_tokens: int | None
    """Tokens that fit the KV cache."""
    max_model_len: int
    max_num_seqs: int
    precision: str
    """Type of the weights, such as `bfloat16`, or their quantization, such as `fp8` or `awq`."""
    kv_token_bytes: Unreported[int] = 0
    block_size: Unreported[int] = 0
    """Tokens per block of the KV cache."""
    given_kv_bytes: Unreported[int | None] = None
    """`kv_cache_memory_bytes`, if it is set."""

    @property
    def taken(self) -> int:
        """All but the KV cache."""
        return self.weights + self.state + self.activations + self.reserve

    @property
    def least(self) -> int:
        """The smallest share with which the stage starts, with the requested KV cache or room for one
        sequence of `max_model_len`."""
        given = self.given_kv_bytes
        return self.taken + (self.kv_bytes(self.max_model_len) if given is None else given)

    def kv_bytes(self, num_tokens: int) -> int:
        """Size of a KV cache for `num_tokens`."""
        return self.kv_token_bytes * (num_tokens + self.block_size)


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one GPU, or of the machine's memory if the index is None."""

    index: int | None
    name: str
    total: int
    free: int | None
    """None if the size came from the command line."""


@dataclass
class Report:
    model: str
    folder: str | None = None
    stage_config: str = ""
    platform: str = ""
    architecture: str | None = None
    dtype: str | None = None
    """The checkpoint's own."""
    num_weight_files: int = 0
    weight_bytes: int = 0
    """As stored."""
    devices: list[DeviceMemory] = field(default_factory=list)
    stages: list[StageMemory] = field(default_factory=list)
    shared_memory_needed: int | None = None
    shared_memory_free: int | None = None
    findings: list[Finding] = field(default_factory=list)

    def error(self, area: Area, message: str) -> None:
        self.findings.append(Finding("error", area, message))

    def errors(self, area: Area, messages: Iterable[str]) -> None:
        for message in dict.fromkeys(messages):
            self.error(area, message)

    def warn(self, area: Area, message: str) -> None:
        self.findings.append(Finding("warning", area, message))

    def leave_open(self, area: Area, message: str) -> None:
        self.findings.append(Finding("unknown", area, message))

    @contextmanager
    def noting(self, area: Area, prefix: str = "") -> Iterator[None]:
        """Catches a `ConfigError` and adds it to this report as an error."""
        try:
            yield
        except ConfigError as error:
            self.error(area, f"{prefix}{error}")

    @property
    def fits(self) -> bool | None:
        """None if that is unknown."""
        severities = {finding.severity for finding in self.findings}
        return False if "error" in severities else None if "unknown" in severities else True


def as_json(report: Report) -> str:
    """All fields, sizes in bytes, and `fits`: true, false, or null if unknown."""
    return json.dumps({"fits": report.fits} | TypeAdapter(Report).dump_python(report), indent=2)


def as_text(report: Report) -> str:
    lines = [f"model         {report.model}"]
    if report.folder is not None and report.folder != report.model:
        lines.append(f"folder        {report.folder}")
    if report.architecture is not None:
        stored = (
            f", {report.num_weight_files} weight files, {gb(report.weight_bytes, 2)}"
            if report.weight_bytes
            else ""
        )
        dtype = f", {report.dtype}" if report.dtype is not None else ""
        lines.append(f"checkpoint    {report.architecture}{dtype}{stored}")
    lines.append(f"stage config  {report.stage_config}, platform {report.platform}")
    for device in report.devices:
        free = f", {gb(device.free, 2)} free" if device.free is not None else ""
        where = "memory" if device.index is None else f"device {device.index}"
        name = "" if device.index is None else f" ({device.name})"
        lines.append(f"{where:13} {gb(device.total, 2)}{free}{name}")
    if report.shared_memory_needed is not None:
        free_shm = report.shared_memory_free
        free = f", {gb(free_shm, 2)} free" if free_shm is not None else ""
        lines.append(f"/dev/shm      {gb(report.shared_memory_needed, 2)} for queues{free}")
    if report.stages:
        lines += [
            "",
            *_table(report.stages),
            _COLUMNS,
            _ESTIMATED if report.platform == "cuda" else _ESTIMATED_CPU,
        ]
    lines.append("")
    for finding in report.findings:
        lines.append(f"{finding.severity}: {finding.area}: {finding.message}")
    return "\n".join([*lines, _verdict(report)])


def _verdict(report: Report) -> str:
    if report.fits is None:
        return "Whether it fits is not known."
    counted: Severity = "warning" if report.fits else "error"
    number = sum(finding.severity == counted for finding in report.findings)
    plural = "" if number == 1 else "s"
    if not report.fits:
        is_too_large = any(
            finding.severity == "error" and "memory" in finding.area for finding in report.findings
        )
        return f"It {'does not fit' if is_too_large else 'cannot be served'}: {number} problem{plural}."
    return f"It fits, with {number} warning{plural}." if number else "It fits."


def _table(stages: list[StageMemory]) -> list[str]:
    rows = [_cells(stage) for stage in stages]
    columns = [(name, *(row[name] for row in rows)) for name in rows[0]]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in zip(*columns, strict=True)
    ]


def _cells(stage: StageMemory) -> dict[str, str]:
    """Cells by column name."""
    return {
        "stage (GB)": stage.name,
        "device": ",".join(map(str, stage.devices)) or "-",
        "precision": stage.precision,
        "requests": str(stage.max_num_seqs),
        "context": f"{stage.max_model_len:,}",
        "share": _number(stage.share),
        "weights": _number(stage.weights),
        "state": _number(stage.state),
        "activations~": _number(stage.activations),
        "reserve~": _number(stage.reserve),
        "KV cache": _number(stage.kv_cache),
        "tokens": "-" if stage.kv_tokens is None else f"{stage.kv_tokens:,}",
    }


def _number(num_bytes: int | None) -> str:
    """As GB."""
    if num_bytes is None:
        return "-"
    return "0" if num_bytes == 0 else f"{num_bytes / 1e9:.2f}"


def gb(num_bytes: int, decimals: int = 1) -> str:
    return f"{num_bytes / 1e9:.{decimals}f} GB"
