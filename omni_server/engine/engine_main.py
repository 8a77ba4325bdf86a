"""What runs in an engine's process, which has been forked from the fork server."""

import gc
import os
import tempfile
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from vllm.utils.system_utils import set_process_title
from vllm.v1.engine.core import EngineCoreProc

from omni_server.engine.fork_server import ENGINE_NAME
from omni_server.protocol.parent_watch import watch_parent


def run_engine(environment: Mapping[str, str], arguments: Mapping[str, Any]) -> None:
    """Run vLLM's engine core until it is told to end.

    `environment` replaces the fork server's; `arguments` are those of vLLM's `run_engine_core`.
    """
    set_process_title(ENGINE_NAME)  # by means of the environment that it was started with
    watch_parent()
    warnings.simplefilter("ignore", FutureWarning)  # of libraries about each other
    # What the fork server has imported stays shared: the collector would write to each of its pages.
    gc.freeze()
    gc.enable()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # Python has looked at the fork server's TMPDIR
    _set_threads(environment.get("OMP_NUM_THREADS", ""))
    EngineCoreProc.run_engine_core(**arguments)


def _set_threads(omp_num_threads: str) -> None:
    """OpenMP has read the fork server's variable. What is not a positive number it ignores."""
    first = omp_num_threads.split(",")[0].strip()
    if first.isdecimal() and int(first) > 0:
        torch.set_num_threads(int(first))
