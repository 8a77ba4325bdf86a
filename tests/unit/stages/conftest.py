"""The two schedulers of an edge, and the queue between them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_server.protocol.runtime_config import QueueSpec
from omni_server.transport.slab_queue import SlabQueue
from stages.runtime.stage_scheduler import StageScheduler
from tests.unit.stages.row_stream import shared_queue
from tests.unit.stages.scheduling import (
    make_scheduler,
)


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
