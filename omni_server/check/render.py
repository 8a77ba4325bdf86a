"""A report as text for people and as JSON for programs."""

import dataclasses
import json

from omni_server.check.report import Report, Severity, StageMemory

_COLUMNS = "requests: max_num_seqs. context: max_model_len. tokens: that the KV cache has room for."
_ESTIMATED = (
    "~ estimated, from runs on an H200: activations, and the part of the reserve that is not the server's own. All\n"
    "  else is computed from the checkpoint's config and headers; the KV cache is what is left of the share."
)
_ESTIMATED_CPU = (
    "~ estimated: activations, and 0.6 GB for each process. All else is computed from the checkpoint's config and\n"
    "  headers."
)


def as_json(report: Report) -> str:
    """All fields, sizes in bytes, and `fits`: true, false, or null where that is not known."""
    return json.dumps({"fits": report.fits} | dataclasses.asdict(report), indent=2)


def as_text(report: Report) -> str:
    lines = [f"model         {report.model}"]
    if report.folder is not None and report.folder != report.model:
        lines.append(f"folder        {report.folder}")
    if report.architecture is not None:
        stored = (
            f", {report.num_weight_files} weight files, {_gb(report.weight_bytes)}"
            if report.weight_bytes
            else ""
        )
        dtype = f", {report.dtype}" if report.dtype is not None else ""
        lines.append(f"checkpoint    {report.architecture}{dtype}{stored}")
    lines.append(f"stage config  {report.stage_config}, platform {report.platform}")
    for device in report.devices:
        free = f", {_gb(device.free)} free" if device.free is not None else ""
        where = "memory" if device.index is None else f"device {device.index}"
        name = "" if device.index is None else f" ({device.name})"
        lines.append(f"{where:13} {_gb(device.total)}{free}{name}")
    if report.shared_memory_needed is not None:
        free_shm = report.shared_memory_free
        free = f", {_gb(free_shm)} free" if free_shm is not None else ""
        lines.append(f"/dev/shm      {_gb(report.shared_memory_needed)} for queues{free}")
    if report.address is not None:
        lines.append(f"address       {report.address}")
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
        return f"It does not fit: {number} problem{plural}."
    return f"It fits, with {number} warning{plural}." if number else "It fits."


def _table(stages: list[StageMemory]) -> list[str]:
    header = [
        "stage (GB)",
        "device",
        "precision",
        "requests",
        "context",
        "share",
        "weights",
        "state",
        "activations~",
    ]
    rows = [[*header, "reserve~", "KV cache", "tokens"]]
    rows += [
        [
            stage.name,
            ",".join(map(str, stage.devices)) or "-",
            stage.precision,
            str(stage.max_num_seqs),
            f"{stage.max_model_len:,}",
            _number(stage.share),
            _number(stage.weights),
            _number(stage.state),
            _number(stage.activations),
            _number(stage.reserve),
            _number(stage.kv_cache),
            "-" if stage.kv_tokens is None else f"{stage.kv_tokens:,}",
        ]
        for stage in stages
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def _number(num_bytes: int | None) -> str:
    """In GB."""
    if num_bytes is None:
        return "-"
    return "0" if num_bytes == 0 else f"{num_bytes / 1e9:.2f}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
