"""What belongs to one engine of a stage, and what to all that follow each other."""

from pathlib import Path
from typing import Any, cast

from omni_server.engine.ar_handle import ArHandle
from omni_server.engine.start_progress import StartProgress
from omni_server.protocol.rows import SharedBlock
from omni_server.protocol.runtime_config import QueueSpec
from omni_server.transport.block_ledger import BlockLedger
from omni_server.transport.slab_queue import SlabQueue
from tests.unit.engine.simulated_engine import World


async def test_blocks_that_an_engine_held_end_with_it(world: World, tmp_path: Path) -> None:
    """Those of its own queue; the other engine of the stage has another one."""
    queues = [
        SlabQueue(QueueSpec(2, str(tmp_path / f"queue-{number}"), 64, 1, 1), create=True)
        for number in range(2)
    ]
    ledgers = [BlockLedger(queue) for queue in queues]
    handles = []
    for ledger, queue in zip(ledgers, queues, strict=True):
        one = ArHandle("talker", cast(Any, world.build), input_ledgers=(ledger,))
        one.attach(cast(Any, world.built()))
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


async def test_counters_go_on_after_a_restart(world: World) -> None:
    one = ArHandle("talker", cast(Any, world.build))
    await one.start(cast(StartProgress, None))
    one.metrics.generation_tokens = 7
    await one.kill("it was killed")
    await one.start(cast(StartProgress, None))
    assert one.engine.output_processor.stage_metrics is one.metrics
    assert one.metrics.generation_tokens == 7
