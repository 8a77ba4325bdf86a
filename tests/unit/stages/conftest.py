"""The two schedulers of an edge, and the queue between them; vLLM's group of one process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment

import tests.quiet_configs  # noqa: F401
from omni_server.protocol.runtime_config import QueueSpec
from omni_server.transport.slab_queue import SlabQueue
from stages.runtime.stage_scheduler import StageScheduler
from tests.unit.stages.row_stream import shared_queue
from tests.unit.stages.scheduling import make_scheduler


@pytest.fixture
def shared() -> Iterator[tuple[QueueSpec, SlabQueue]]:
    spec, queue = shared_queue(capacity=2)
    yield spec, queue
    queue.close()


@pytest.fixture
def talker(tmp_path: Path, shared: tuple[QueueSpec, SlabQueue]) -> StageScheduler:
    return make_scheduler(tmp_path, input_queue=shared[0])


@pytest.fixture
def thinker(tmp_path: Path, shared: tuple[QueueSpec, SlabQueue]) -> StageScheduler:
    return make_scheduler(tmp_path, output_queue=shared[0])


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """The only rank of its group."""
    init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, backend="gloo")
    yield
    cleanup_dist_env_and_memory()
