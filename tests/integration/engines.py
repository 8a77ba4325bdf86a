"""Single engines for tests: built as a server builds them."""

import os
from pathlib import Path
from typing import TypeVar

from vllm.engine.arg_utils import AsyncEngineArgs

from omni_server.engine.ar_handle import ArHandle
from omni_server.engine.async_engine import StageAsyncLLM
from omni_server.engine.construction import BuiltEngine, build_engine
from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.engine.engine_handle import BuildEngine
from omni_server.engine.start_progress import StartProgress
from tests.integration.forked_server import start_fork_server

START_TIMEOUT_S = 300.0

HandleT = TypeVar("HandleT", ArHandle, DiffusionHandle)

CPU_ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


async def ar_engine(name: str, arguments: AsyncEngineArgs, folder: Path) -> ArHandle:
    """`folder` takes its sockets, so its path must be short."""
    return await _started(ArHandle(name, _builder(name, arguments, folder)))


async def diffusion_engine(name: str, arguments: AsyncEngineArgs, folder: Path) -> DiffusionHandle:
    """As `ar_engine`."""
    return await _started(DiffusionHandle(name, _builder(name, arguments, folder)))


async def _started(handle: HandleT) -> HandleT:
    start_fork_server()
    with StartProgress(lambda line: None) as progress:
        await handle.start(progress)
    return handle


def _builder(name: str, arguments: AsyncEngineArgs, folder: Path) -> BuildEngine:
    async def build(progress: StartProgress) -> BuiltEngine:
        progress.began(name)
        return await build_engine(
            name,
            StageAsyncLLM,
            arguments,
            environment=dict(os.environ) | CPU_ENVIRONMENT,
            folder=folder,
            timeout_s=START_TIMEOUT_S,
            progress=progress,
        )

    return build
