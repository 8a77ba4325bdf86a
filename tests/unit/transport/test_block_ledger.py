"""What a dead process held of a queue is ended in its place, and what others hold is not touched."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_server.protocol.rows import SharedBlock
from omni_server.protocol.runtime_config import QueueSpec
from omni_server.transport.block_ledger import BlockLedger
from omni_server.transport.slab_queue import SlabQueue, new_queue_path

CAPACITY = 3
MAX_PORTIONS = 4
NUM_CONSUMERS = 2


class Edge:
    """The queue of an edge as its three processes have it mapped."""

    def __init__(self) -> None:
        path = new_queue_path("test")
        self.server = self._map(path, create=True)
        self.ledger = BlockLedger(self.server)
        self.producer = self._map(path)
        self.consumer = self._map(path)

    @staticmethod
    def _map(path: Path, *, create: bool = False) -> SlabQueue:
        return SlabQueue(QueueSpec(CAPACITY, str(path), 64, MAX_PORTIONS, NUM_CONSUMERS), create=create)

    def restart_producer(self) -> None:
        self.producer.close()
        self.producer = self._map(self.server.path)

    def step(self, num_portions: int) -> list[SharedBlock]:
        """One step of the producer."""
        taken = self.producer.take()
        assert taken is not None
        self.producer.publish(*taken, num_portions)
        return [SharedBlock(*taken, portion) for portion in range(num_portions)]

    def read(self, block: SharedBlock) -> None:
        self.consumer.check(block)
        for rank in range(NUM_CONSUMERS):
            self.consumer.finish(block, rank)

    def close(self) -> None:
        self.producer.close()
        self.consumer.close()
        self.server.close()


@pytest.fixture
def edge() -> Iterator[Edge]:
    edge = Edge()
    yield edge
    edge.close()


def test_blocks_that_a_dead_producer_never_handed_over_are_ended(edge: Edge) -> None:
    first, second = edge.step(2)
    edge.ledger.received(first)
    assert edge.ledger.producer_died() == 1
    assert not edge.server.is_open(second)
    assert edge.server.is_open(first), "it is on its way to the consumer, which will read it"
    edge.read(first)
    assert edge.server.num_in_use() == 0


def test_blocks_that_a_dead_consumer_was_given_are_ended_also_where_some_ranks_had_read_them(
    edge: Edge,
) -> None:
    sent, half_read, kept = edge.step(3)
    for block in (sent, half_read, kept):
        edge.ledger.received(block)
    for block in (sent, half_read):
        edge.ledger.sent(block, 0)
    edge.consumer.finish(half_read, 0)
    assert edge.ledger.consumer_died(0) == 2
    assert edge.server.is_open(kept), "it is with the server, which drops it itself"
    edge.server.finish_all(kept)
    assert edge.server.num_in_use() == 0


def test_blocks_of_other_replicas_of_the_consumer_stay(edge: Edge) -> None:
    dead, living = edge.step(2)
    for number, block in enumerate((dead, living)):
        edge.ledger.received(block)
        edge.ledger.sent(block, number)
    assert edge.ledger.consumer_died(0) == 1
    assert not edge.server.is_open(dead)
    assert edge.server.is_open(living)
    edge.read(living)
    assert edge.server.num_in_use() == 0


def test_slot_that_is_used_again_is_not_ended_for_its_earlier_use(edge: Edge) -> None:
    for _ in range(CAPACITY):
        (block,) = edge.step(1)
        edge.ledger.received(block)
        edge.ledger.sent(block, 0)
        edge.read(block)
    (again,) = edge.step(1)
    edge.ledger.received(again)
    assert again.slot == block.slot
    assert edge.ledger.consumer_died(0) == 0
    assert edge.ledger.producer_died() == 0
    assert edge.server.is_open(again)


def test_new_producer_goes_on_where_the_dead_one_ended(edge: Edge) -> None:
    (in_use,) = edge.step(1)
    edge.ledger.received(in_use)
    (lost,) = edge.step(1)
    edge.ledger.producer_died()
    edge.restart_producer()
    later = [edge.step(1)[0] for _ in range(CAPACITY - 1)]
    assert in_use.slot not in {block.slot for block in later}, "its rows are still being read"
    assert {block.slot: block.generation for block in later}[lost.slot] == lost.generation + 1
    edge.consumer.check(in_use)
    with pytest.raises(ValueError, match="stale"):
        edge.consumer.check(lost)
    assert edge.producer.take() is None


def test_producer_that_dies_while_it_publishes_leaves_no_slot_in_use(edge: Edge) -> None:
    """It had written how many portions there are, and not yet that they are there."""
    (block,) = edge.step(1)
    edge.ledger.received(block)
    edge.read(block)
    torn = edge.server
    torn.publish(block.slot, block.generation, 3)
    assert torn.num_in_use() == 1
    edge.ledger.producer_died()
    assert torn.num_in_use() == 0
    edge.restart_producer()
    assert edge.producer.num_free() == CAPACITY


def test_dying_again_and_again_uses_up_nothing(edge: Edge) -> None:
    for _ in range(20):
        blocks = edge.step(MAX_PORTIONS)
        for block in blocks[1:]:
            edge.ledger.received(block)
        edge.ledger.sent(blocks[1], 0)
        edge.read(blocks[2])
        edge.ledger.sent(blocks[2], 0)
        edge.server.finish_all(blocks[3])
        edge.ledger.producer_died()
        edge.ledger.consumer_died(0)
        edge.restart_producer()
        assert edge.producer.num_free() == CAPACITY
