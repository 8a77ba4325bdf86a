"""The machine on which the load generator runs."""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import aiohttp

from omni_server.bench.results import Host


def describe_host() -> Host:
    return Host(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        gpus=_gpus(),
        python=platform.python_version(),
        aiohttp=aiohttp.__version__,
    )


def _cpu_model() -> str:
    model = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return model[1] if model is not None else platform.machine()


def _gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []  # the tool is there and no driver is: a host without a GPU, as far as this report goes
    return answer.stdout.splitlines()
