"""The consumer's copy of a request's rows."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from omni_server.protocol.rows import InlineBlock, RowDtype, RowsFeed, RowsPayload, Segment, SharedBlock
from omni_server.transport.slab_queue import SlabQueue
from stages.runtime.row_store import RowStore
from tests.unit.stages.row_stream import shared_queue

TAIL = torch.tensor([[7.0, 7.5], [8.0, 8.5]])


def payload(
    first: int,
    rows: torch.Tensor,
    *,
    dtype: RowDtype = "float32",
    tail: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    delta: int = 0,
) -> RowsPayload:
    """`rows` `[n, width]` from position `first` on; the tail and the positions lie behind them."""
    parts = [rows] + ([] if tail is None else [tail.to(rows.dtype)])
    data = b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)
    positions_offset = None
    if positions is not None:
        positions_offset = len(data)
        data += positions.to(torch.int32).contiguous().numpy().tobytes()
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
        position_delta=delta,
    )


def numbered(first: int, count: int) -> torch.Tensor:
    """Rows that say their position."""
    return torch.arange(first, first + count, dtype=torch.float32)[:, None].repeat(1, 2)


def filled(count: int, *, tail: torch.Tensor | None = TAIL) -> RowStore:
    store = RowStore()
    store.add(RowsFeed(payload(0, numbered(0, count), tail=tail)), None, 0)
    return store


def test_rows_come_back_by_absolute_position() -> None:
    store = filled(5)
    store.add(RowsFeed(payload(5, numbered(5, 3))), None, 0)
    assert store.num_rows == 8
    assert torch.equal(store.rows(0, 8), numbered(0, 8))
    assert torch.equal(store.rows(4, 3), numbered(4, 3))


def test_rows_survive_the_growth_of_the_store() -> None:
    store = RowStore()
    for position in range(300):
        store.add(RowsFeed(payload(position, numbered(position, 1))), None, 0)
    assert torch.equal(store.rows(0, 300), numbered(0, 300))


def test_a_row_that_has_not_come_is_an_error_that_names_it() -> None:
    store = filled(5)
    with pytest.raises(IndexError, match="position 5 has not come"):
        store.rows(3, 3)


def test_a_gap_in_the_positions_is_refused() -> None:
    store = filled(5)
    with pytest.raises(ValueError, match="from position 6, but 5 rows are there"):
        store.add(RowsFeed(payload(6, numbered(6, 1))), None, 0)


def test_rows_that_come_twice_are_refused() -> None:
    store = filled(5)
    with pytest.raises(ValueError, match="from position 4"):
        store.add(RowsFeed(payload(4, numbered(4, 2))), None, 0)


def test_behind_the_last_row_each_tail_row_follows_and_the_last_repeats() -> None:
    store = filled(5)
    store.add(RowsFeed(final_length=5), None, 0)
    assert torch.equal(store.rows(3, 5), torch.cat([numbered(3, 2), TAIL[[0, 1, 1]]]))
    assert torch.equal(store.rows(5, 1), TAIL[:1])
    assert torch.equal(store.rows(6, 1), TAIL[1:])
    assert torch.equal(store.rows(90, 2), TAIL[[1, 1]])


def test_rows_beyond_the_final_length_are_never_used() -> None:
    store = filled(6)
    store.add(RowsFeed(final_length=4), None, 0)
    assert torch.equal(store.rows(2, 4), torch.cat([numbered(2, 2), TAIL]))


def test_the_last_rows_and_the_end_may_come_together() -> None:
    store = filled(5)
    store.add(RowsFeed(payload(5, numbered(5, 1)), final_length=6), None, 0)
    assert torch.equal(store.rows(5, 2), torch.cat([numbered(5, 1), TAIL[:1]]))


def test_an_end_without_a_tail_does_not_make_rows_up() -> None:
    store = filled(5, tail=None)
    store.add(RowsFeed(final_length=5), None, 0)
    with pytest.raises(IndexError, match="position 5"):
        store.rows(5, 1)


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_rows_keep_their_dtype_bit_for_bit(name: RowDtype, dtype: torch.dtype) -> None:
    rows = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    store = RowStore()
    store.add(RowsFeed(payload(0, rows, dtype=name, tail=TAIL)), None, 0)
    store.add(RowsFeed(final_length=3), None, 0)
    assert store.rows(0, 3).dtype == dtype
    assert torch.equal(store.rows(0, 4), torch.cat([rows, TAIL[:1].to(dtype)]))


def test_positions_of_the_prompt_go_on_behind_it_with_the_delta() -> None:
    prompt = torch.tensor([[0, 1, 1, 1], [0, 1, 2, 3], [0, 1, 1, 2]])
    store = RowStore()
    store.add(RowsFeed(payload(0, numbered(0, 3), positions=prompt[:, :3], delta=-2)), None, 0)
    store.add(RowsFeed(payload(3, numbered(3, 1), positions=prompt[:, 3:], delta=-2)), None, 0)
    given = store.sequence_positions(6)
    assert given is not None
    positions, delta = given
    assert delta == -2
    assert torch.equal(positions, torch.cat([prompt, torch.tensor([[2, 3]] * 3)], 1))
    assert positions.dtype == torch.int64


def test_positions_of_a_shorter_sequence_are_cut() -> None:
    prompt = torch.tensor([[0, 1, 1, 1]] * 3)
    store = RowStore()
    store.add(RowsFeed(payload(0, numbered(0, 4), positions=prompt)), None, 0)
    given = store.sequence_positions(2)
    assert given is not None
    assert torch.equal(given[0], prompt[:, :2])


def test_without_positions_the_stage_uses_its_own() -> None:
    assert filled(5).sequence_positions(6) is None


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
    stores = [RowStore(), RowStore()]
    stores[0].add(message, queue, 0)
    assert queue.num_in_use() == 1, "the other rank has not copied yet"
    stores[1].add(message, queue, 1)
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
        RowStore().add(RowsFeed(stale), queue, 0)
    assert queue.num_in_use() == 1


def test_a_reference_without_a_queue_is_refused(queue: SlabQueue) -> None:
    message = RowsFeed(in_shared_memory(queue, numbered(0, 3)))
    with pytest.raises(ValueError, match="no input queue"):
        RowStore().add(message, None, 0)


def test_any_cutting_gives_the_same_rows() -> None:
    random = np.random.default_rng(3)
    for _ in range(20):
        length = int(random.integers(1, 200))
        store, position = RowStore(), 0
        while position < length:
            count = min(length - position, int(random.integers(1, 40)))
            store.add(
                RowsFeed(payload(position, numbered(position, count), tail=TAIL if not position else None)), None, 0
            )
            position += count
        store.add(RowsFeed(final_length=length), None, 0)
        first = int(random.integers(0, length))
        assert torch.equal(store.rows(first, length - first), numbered(first, length - first))
        assert torch.equal(store.rows(length, 1), TAIL[:1])
