"""A stage of several engines, and what belongs to each of them alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from omni_server.engine import engine_handle
from omni_server.engine.ar_handle import ArHandle
from omni_server.engine.async_engine import StageAsyncLLM
from omni_server.engine.construction import BuiltEngine
from omni_server.engine.engine_handle import EngineHandle
from omni_server.engine.engine_processes import EngineProcesses
from omni_server.engine.start_progress import StartProgress
from omni_server.protocol.rows import SharedBlock
from omni_server.protocol.runtime_config import QueueSpec
from omni_server.transport.block_ledger import BlockLedger
from omni_server.transport.slab_queue import SlabQueue


class Processes:
    """Stands for `EngineProcesses`."""

    core_pid = 4711

    def __init__(self) -> None:
        self.has_ended = False

    def kill(self) -> None:
        self.has_ended = True

    def wait(self, timeout_s: float) -> bool:
        return True

    def remove_leftovers(self) -> None:
        return

    def close(self) -> None:
        return


def built(num_active: int = 0) -> BuiltEngine[Any]:
    engine = SimpleNamespace(
        errored=False,
        output_processor=SimpleNamespace(get_num_unfinished_requests=lambda: num_active),
        model_config=SimpleNamespace(max_model_len=64),
    )
    return BuiltEngine(cast(AsyncLLM, engine), cast(EngineProcesses, Processes()))


async def build(progress: StartProgress) -> BuiltEngine[Any]:
    return built()


def handle(num_active: int = 0) -> EngineHandle[AsyncLLM]:
    """Of an engine that is up."""
    one: EngineHandle[AsyncLLM] = EngineHandle("talker", build)
    one.attach(built(num_active))
    one.num_requests = num_active
    return one


@pytest.fixture(autouse=True)
def frontend(monkeypatch: pytest.MonkeyPatch) -> None:
    async def close_frontend(engine: AsyncLLM) -> bool:
        return True

    monkeypatch.setattr(engine_handle, "close_frontend", close_frontend)


async def test_blocks_that_an_engine_held_end_with_it(tmp_path: Path) -> None:
    """Those of its own queue; the other engine of the stage has another one."""
    queues = [
        SlabQueue(QueueSpec(2, str(tmp_path / f"queue-{number}"), 64, 1, 1), create=True)
        for number in range(2)
    ]
    ledgers = [BlockLedger(queue) for queue in queues]
    handles = []
    for ledger, queue in zip(ledgers, queues, strict=True):
        one = ArHandle("talker", build, input_ledgers=(ledger,))
        one.attach(cast(BuiltEngine[StageAsyncLLM], built()))
        handles.append(one)
        taken = queue.take()
        assert taken is not None
        queue.publish(*taken, 1)
        block = SharedBlock(*taken, 0)
        ledger.received(block)
        ledger.sent(block, 0)
    await handles[0].kill("it was killed")
    assert [queue.num_in_use() for queue in queues] == [0, 1]
    for queue in queues:
        queue.close()


async def test_counters_go_on_after_a_restart() -> None:
    one = ArHandle("talker", build)
    await one.start(cast(StartProgress, None))
    one.metrics.generation_tokens = 7
    await one.kill("it was killed")
    await one.start(cast(StartProgress, None))
    assert one.engine.output_processor.stage_metrics is one.metrics
    assert one.metrics.generation_tokens == 7
