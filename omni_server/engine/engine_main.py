"""The main function of an engine's process, which is forked from the fork server."""

import gc
import os
import tempfile
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.utils.system_utils import set_process_title
from vllm.v1.engine.core import EngineCoreProc

from omni_server.engine.fork_server import ENGINE_NAME
from omni_server.protocol.parent_watch import watch_parent

warnings.simplefilter("ignore", FutureWarning)  # from libraries about each other
# Once, in the process that engines are forked from (`stages.runtime.cpu_platform`).
current_platform.register_triton_kernel_overrides()


def run_engine(environment: Mapping[str, str], arguments: Mapping[str, Any]) -> None:
    """Runs vLLM's engine core until it is told to end.

    `environment` replaces the fork server's; `arguments` are those of vLLM's `run_engine_core`.
    """
    set_process_title(ENGINE_NAME)  # needs the environment that it was started with
    watch_parent()
    # Keeps the fork server's imports shared: the collector would write to each of their pages.
    gc.freeze()
    gc.enable()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # Python has cached the fork server's TMPDIR
    _set_threads(environment.get("OMP_NUM_THREADS", ""))
    EngineCoreProc.run_engine_core(**arguments)


def _set_threads(omp_num_threads: str) -> None:
    """OpenMP has read the fork server's variable. It ignores values that are not positive numbers."""
    first = omp_num_threads.split(",")[0].strip()
    if first.isdecimal() and int(first) > 0:
        torch.set_num_threads(int(first))
