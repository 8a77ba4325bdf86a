"""The consumer's copy of a request's rows."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from omni_server.protocol.rows import (
    InlineBlock,
    RowDtype,
    RowsFeed,
    RowsInput,
    RowsPayload,
    Segment,
    SharedBlock,
)
from omni_server.transport.slab_queue import SlabQueue
from stages.runtime.embedding_store import RowStore
from tests.unit.stages.row_stream import Received, shared_queue, stored_rows

TAIL = torch.tensor([[7.0, 7.5], [8.0, 8.5]])


def payload(
    first: int,
    rows: torch.Tensor,
    *,
    dtype: RowDtype = "float32",
    tail: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> RowsPayload:
    """`rows` `[n, width]` from position `first` on; the tail and the positions `[3, n + 1]` lie behind
    them."""
    parts = [rows] + ([] if tail is None else [tail.to(rows.dtype)])
    data = b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
    positions_offset = None
    if positions is not None:
        positions_offset = len(data)
        data += positions.float().contiguous().numpy().tobytes()
    return RowsPayload(
        prompt_length=4,
        num_generated_rows=0,
        width=rows.shape[1],
        dtype=dtype,
        block=InlineBlock(data),
        segments=(Segment(first, len(rows), 0),),
        tail=None if tail is None else Segment(0, len(tail), rows.nbytes),
        positions_offset=positions_offset,
        num_positions=0 if positions is None else positions.shape[1],
    )


def numbered(first: int, count: int) -> torch.Tensor:
    """Rows that say their position."""
    return torch.arange(first, first + count, dtype=torch.float32)[:, None].repeat(1, 2)


def filled(count: int, *, tail: torch.Tensor | None = TAIL) -> Received:
    store = Received()
    store.add(RowsFeed(payload(0, numbered(0, count), tail=tail)))
    return store


def test_behind_the_last_row_each_tail_row_follows_and_the_last_repeats() -> None:
    store = filled(5)
    store.add(RowsFeed(final_length=5))
    assert torch.equal(store.rows(3, 5), torch.cat([numbered(3, 2), TAIL[[0, 1, 1]]]))
    assert torch.equal(store.rows(5, 1), TAIL[:1])
    assert torch.equal(store.rows(6, 1), TAIL[1:])
    assert torch.equal(store.rows(90, 2), TAIL[[1, 1]])


def test_rows_beyond_the_final_length_are_never_used() -> None:
    store = filled(6)
    store.add(RowsFeed(final_length=4))
    assert torch.equal(store.rows(2, 4), torch.cat([numbered(2, 2), TAIL]))


def test_an_end_without_a_tail_does_not_make_rows_up() -> None:
    store = filled(5, tail=None)
    store.add(RowsFeed(final_length=5))
    with pytest.raises(IndexError, match="position 5"):
        store.rows(5, 1)


def test_text_follows_the_rows_with_positions_where_the_producer_said() -> None:
    """Here, below the greatest position of the rows."""
    prompt = torch.tensor([[0, 1, 1.5, 1.5, 2.5], [0, 1, 2, 3, 2.5], [0, 1, 1, 2, 2.5]])
    store = Received()
    store.add(RowsFeed(payload(0, numbered(0, 3), positions=prompt[:, :4])))
    store.add(RowsFeed(payload(3, numbered(3, 1), positions=prompt[:, 3:])))
    positions = store.prompt_positions(7)
    assert positions is not None
    behind = torch.tensor([[3.5, 4.5]]).expand(3, -1)
    assert torch.equal(positions, torch.cat([prompt, behind], 1))


@pytest.fixture
def queue() -> Iterator[SlabQueue]:
    _, queue = shared_queue(capacity=1, num_consumers=2)
    yield queue
    queue.close()


def in_shared_memory(queue: SlabQueue, rows: torch.Tensor) -> RowsPayload:
    taken = queue.take()
    assert taken is not None
    slot, generation = taken
    data = rows.numpy().tobytes()
    queue.slot_buffer(slot)[: len(data)] = data
    queue.publish(slot, generation, 1)
    block = SharedBlock(slot, generation, 0)
    return RowsPayload(4, 0, rows.shape[1], "float32", block, (Segment(0, len(rows), 0),))


def test_rows_are_copied_out_of_the_slot_and_the_reference_ends_for_this_rank(queue: SlabQueue) -> None:
    message = RowsFeed(in_shared_memory(queue, numbered(0, 3)))
    stores = [Received(queue, 0), Received(queue, 1)]
    stores[0].add(message)
    assert queue.num_in_use() == 1, "the other rank has not copied yet"
    stores[1].add(message)
    assert queue.num_in_use() == 0
    queue.slot_buffer(0)[:] = bytes(queue.slot_bytes)
    for store in stores:
        assert torch.equal(store.rows(0, 3), numbered(0, 3))


def test_a_stale_reference_is_refused(queue: SlabQueue) -> None:
    stale = in_shared_memory(queue, numbered(0, 3))
    assert isinstance(stale.block, SharedBlock)
    queue.finish_all(stale.block)
    in_shared_memory(queue, numbered(50, 3))
    with pytest.raises(ValueError, match="stale reference"):
        Received(queue).add(RowsFeed(stale))
    assert queue.num_in_use() == 1


def test_requests_do_not_mix_and_leave_nothing_behind() -> None:
    """Rows of many requests, interleaved, with requests that end and new ones that take their place."""
    random = np.random.default_rng(5)
    store = RowStore((), 0)
    have: dict[str, int] = {}
    offset: dict[str, float] = {}
    names = iter(range(10_000))
    for _ in range(600):
        if len(have) < 12 and random.random() < 0.3:
            name = f"r{next(names)}"
            have[name], offset[name] = 0, float(random.integers(0, 1000) * 1000)
            store.announce(name, RowsInput(num_replaced=0))
        if have and random.random() < 0.1:
            name = str(random.choice(list(have)))
            store.remove(name)
            del have[name]
        for name in have:
            count = int(random.integers(1, 20))
            rows = numbered(have[name], count) + offset[name]
            store.add(name, RowsFeed(payload(have[name], rows, tail=TAIL if not have[name] else None)))
            have[name] += count
    assert len(store) == len(have) > 0
    for name, count in have.items():
        assert torch.equal(stored_rows(store, name, 0, count), numbered(0, count) + offset[name])
        store.add(name, RowsFeed(final_length=count))
        assert torch.equal(stored_rows(store, name, count, 2), TAIL)
        store.remove(name)
    assert len(store) == 0
