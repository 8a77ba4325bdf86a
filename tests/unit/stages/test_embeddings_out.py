"""Rows out of the producing stage, and the whole way from its hidden states into the consumer's store."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from omni_server.protocol.corruption import Corruption
from omni_server.protocol.rows import InlineBlock, RowsFeed
from omni_server.transport.slab_queue import SlabQueue
from stages.runtime.embeddings_out import RowEmitter
from tests.unit.stages.row_stream import (
    MEDIA_TOKEN,
    WIDTH,
    Producer,
    Received,
    Spoken,
    inline_spec,
    shared_queue,
)

TEXT = [1, 2, 3, 4, 5]


@dataclass
class Edge:
    """Producer and queue; `receive` is the consuming side."""

    producer: Producer
    queue: SlabQueue | None

    def received(self) -> Received:
        return Received(self.queue)

    def in_use(self) -> int:
        return 0 if self.queue is None else self.queue.num_in_use()


@pytest.fixture(params=["inline", "shared_memory"])
def edge(request: pytest.FixtureRequest) -> Iterator[Edge]:
    if request.param == "inline":
        yield Edge(Producer(inline_spec(), None), None)
        return
    spec, queue = shared_queue()
    yield Edge(Producer(spec, queue), queue)
    queue.close()


def holds_what_was_computed(store: Received, spoken: Spoken) -> None:
    expected = spoken.expected_rows()
    assert store.num_rows == len(expected)
    rows = store.rows(0, len(expected))
    assert rows.dtype == spoken.dtype
    assert torch.equal(rows, expected)
    positions = store.prompt_positions(len(spoken.prompt) + 2)
    assert positions is not None
    assert torch.equal(positions[:, :-1], spoken.positions)
    assert torch.equal(positions[:, -1:], spoken.positions[:, -1:] + 1)
    store.add(RowsFeed(final_length=len(expected)))
    assert store.rows(len(expected), 3)[:, 0].tolist() == [200.0, 300.0, 300.0]


@pytest.mark.parametrize("counts", [[9], [5, 4], [3, 4, 2], [7, 2], [1] * 9])
def test_a_given_reply_has_the_rows_of_one_that_was_sampled(edge: Edge, counts: list[int]) -> None:
    given = Spoken("r", TEXT, 4, is_given=True)
    edge.producer.add(given)
    store, position = edge.received(), 0
    for count in counts:
        payload = edge.producer.step([(given, position, count)])["r"]
        store.add(RowsFeed(payload))
        position += count
        assert payload.prompt_length == len(TEXT)
        assert payload.num_generated_rows == max(0, position - len(TEXT))
    holds_what_was_computed(store, given)
    positions = store.prompt_positions(len(TEXT))
    assert positions is not None
    assert torch.equal(positions, given.positions[:, :-1])


def test_tokens_of_the_prefix_cache_are_refused(edge: Edge) -> None:
    spoken = Spoken("a", TEXT, 1)
    edge.producer.add(spoken)
    with pytest.raises(RuntimeError, match="must not read the prefix cache"):
        edge.producer.step([(spoken, 3, 2)])


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_are_not_finite_are_told_of_their_request_and_of_no_other(
    edge: Edge, dtype: torch.dtype, value: float
) -> None:
    """In one place of one row; the largest finite numbers are in order. What is padding is nobody's."""
    parts = [Spoken(name, TEXT, 3, dtype=dtype, seed=seed) for seed, name in enumerate("abc")]
    for spoken in parts:
        edge.producer.add(spoken)
        spoken.embeds.fill_(0)
        spoken.hidden[0, :2] = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min])
    parts[1].hidden[6, WIDTH - 1] = value
    payloads = edge.producer.step([(spoken, 0, 6) for spoken in parts], padding=2)
    assert edge.producer.corrupt == {}
    payloads = edge.producer.step([(spoken, 6, 2) for spoken in parts], padding=2)
    assert edge.producer.corrupt == {
        "b": Corruption("rows", "NaN or infinity in the rows from position 7 on")
    }
    assert set(payloads) == {"a", "b", "c"}  # its reference has to be ended as well


def test_a_step_without_new_rows_gives_its_slot_back() -> None:
    spec, queue = shared_queue(capacity=1)
    try:
        producer = Producer(spec, queue)
        assert producer.step([(Spoken("text only", TEXT, 0), 0, 5)]) == {}
        assert queue.num_free() == 1
    finally:
        queue.close()


def test_rows_that_do_not_fit_the_slot_are_refused() -> None:
    spec, queue = shared_queue(slot_bytes=4096)
    try:
        producer = Producer(spec, queue)
        spoken = Spoken("a", [1] * 200, 0)
        producer.add(spoken)
        with pytest.raises(RuntimeError, match="in a slot of 4096"):
            producer.step([(spoken, 0, 200)])
    finally:
        queue.close()


def test_an_inline_message_holds_its_own_rows_only() -> None:
    producer = Producer(inline_spec(), None)
    short, long = Spoken("short", TEXT, 1), Spoken("long", [1] * 300, 0)
    for spoken in (short, long):
        producer.add(spoken)
    producer.step([(long, 0, 200), (short, 0, 5)])
    block = producer.step([(long, 200, 100), (short, 5, 1)])["short"].block
    assert isinstance(block, InlineBlock)
    assert len(block.data) == WIDTH * 4


def test_a_removed_request_sends_nothing_more(edge: Edge) -> None:
    spoken = Spoken("a", TEXT, 1)
    edge.producer.add(spoken)
    emitter: RowEmitter = edge.producer.emitter
    assert len(emitter) == 1
    emitter.remove("a")
    emitter.remove("never seen")
    assert len(emitter) == 0
    assert edge.producer.step([(spoken, 0, 5)]) == {}
    assert edge.in_use() == 0


@pytest.mark.parametrize("seed", range(10))
def test_any_course_of_steps_gives_the_reference_rows(edge: Edge, seed: int) -> None:
    """Random requests, cuttings, batch orders and preemptions."""
    random = np.random.default_rng(seed)
    sequences = [
        Spoken(
            f"r{number}",
            random.choice([1, 2, MEDIA_TOKEN], int(random.integers(1, 20))).tolist(),
            int(random.integers(0, 15)),
            voice=str(random.choice(["Ada", "Bob"])),
            modalities=frozenset({"audio"}) if random.random() < 0.5 else frozenset(),
            dtype=torch.bfloat16 if seed % 2 else torch.float32,
            seed=seed * 10 + number,
        )
        for number in range(4)
    ]
    stores = {spoken.request_id: edge.received() for spoken in sequences}
    position = dict.fromkeys(stores, 0)
    for spoken in sequences:
        edge.producer.add(spoken)
    while unfinished := [s for s in sequences if position[s.request_id] < s.length]:
        step = []
        for index in random.permutation(len(unfinished))[: random.integers(1, 5)]:
            spoken = unfinished[index]
            first = position[spoken.request_id]
            if random.random() < 0.1:
                first = 0  # preempted
            count = int(min(spoken.length - first, random.integers(1, 9)))
            step.append((spoken, first, count))
            position[spoken.request_id] = first + count
        for request_id, payload in edge.producer.step(step, padding=int(random.integers(0, 4))).items():
            stores[request_id].add(RowsFeed(payload))
    for spoken in sequences:
        holds_what_was_computed(stores[spoken.request_id], spoken)
    assert edge.in_use() == 0
