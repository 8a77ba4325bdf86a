"""Single engines for tests: built as a server builds them."""

import os
from pathlib import Path
from typing import TypeVar

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from omni_server.engine.construction import BuiltEngine, build_engine
from omni_server.engine.start_progress import StartProgress
from tests.integration.forked_server import start_fork_server

START_TIMEOUT_S = 300.0

EngineT = TypeVar("EngineT", bound=AsyncLLM)

CPU_ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


async def engine_of(
    name: str, client_class: type[EngineT], arguments: AsyncEngineArgs, folder: Path
) -> BuiltEngine[EngineT]:
    """`folder` takes its sockets, so its path must be short."""
    start_fork_server()
    with StartProgress(lambda line: None) as progress:
        progress.began(name)
        return await build_engine(
            name,
            client_class,
            arguments,
            environment=dict(os.environ) | CPU_ENVIRONMENT,
            folder=folder,
            timeout_s=START_TIMEOUT_S,
            progress=progress,
        )
