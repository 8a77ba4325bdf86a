"""Rows that the consumer looks up by text id, between rows that it is sent."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from omni_server.protocol.rows import (
    ComposedSegment,
    InlineBlock,
    RowDtype,
    RowsFeed,
    RowsInput,
    RowsPayload,
    Segment,
    TextSegment,
)
from stages.runtime.embedding_store import RowStore
from stages.runtime.embeddings_in import FeedTracker, RowOverlay
from tests.unit.stages.row_stream import stored_rows
from tests.unit.stages.test_embedding_store import numbered, payload
from tests.unit.stages.test_embeddings_in import batch, embeddings

VOCABULARY = 20
TABLE = 1000 + torch.arange(2 * VOCABULARY, dtype=torch.float32).reshape(VOCABULARY, 2)
END, PAD = 18, 19


def text(first: int, *token_ids: int) -> TextSegment:
    return TextSegment(first, token_ids)


def store(table: torch.Tensor = TABLE) -> RowStore:
    made = RowStore((), 0)
    made.use_table(table)
    made.announce("r", RowsInput(num_replaced=0))
    return made


def rows(made: RowStore, first: int, count: int) -> torch.Tensor:
    return stored_rows(made, "r", first, count)


# -- the worker's rows


def test_text_alone_needs_no_rows_of_the_source() -> None:
    made = store()
    made.add("r", RowsFeed(text=(text(0, 3, 1, 3),), tail_ids=(END, PAD)))
    made.add("r", RowsFeed(text=(text(3, 7),), final_length=4))
    assert torch.equal(rows(made, 0, 7), TABLE[[3, 1, 3, 7, END, PAD, PAD]])


@pytest.mark.parametrize("token_id", [-1, VOCABULARY, 10**9])
def test_an_id_without_a_row_is_refused(token_id: int) -> None:
    with pytest.raises(ValueError, match=f"text id {token_id} has no row among 20"):
        store().add("r", RowsFeed(text=(text(0, 3, token_id),)))


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", torch.bfloat16), ("float32", torch.float32)])
def test_rows_of_another_dtype_take_that_of_the_table(name: RowDtype, dtype: torch.dtype) -> None:
    made = store(TABLE.half())
    made.add("r", RowsFeed(payload(0, numbered(0, 3).to(dtype), dtype=name), text=(text(3, 4),)))
    assert torch.equal(rows(made, 0, 4), torch.cat([numbered(0, 3), TABLE[[4]]]).half())


def located(first: int, *positions: list[float]) -> RowsPayload:
    """Rows with positions; the last is that of what follows them."""
    given = torch.tensor(positions).T
    return payload(first, numbered(first, given.shape[1] - 1), positions=given)


def test_text_between_rows_with_positions_has_linear_ones() -> None:
    made = store()
    first = located(2, [2, 2, 2], [2, 2, 3], [2.5, 3, 2], [4, 4, 4])
    made.add("r", RowsFeed(first, text=(text(0, 3, 4),)))
    second = located(7, [6, 6, 6], [6, 6, 7], [7.5, 7.5, 7.5])
    made.add("r", RowsFeed(second, text=(text(5, 5, 6), text(9, 7))))
    positions = made.get("r").prompt_positions(11)  # type: ignore[union-attr]
    assert positions is not None
    assert positions[0].tolist() == [0, 1, 2, 2, 2.5, 4, 5, 6, 6, 7.5, 8.5]
    assert positions[1].tolist() == [0, 1, 2, 2, 3, 4, 5, 6, 6, 7.5, 8.5]
    assert positions[2].tolist() == [0, 1, 2, 3, 2, 4, 5, 6, 7, 7.5, 8.5]


def test_a_bad_id_is_found_and_harms_no_other_request() -> None:
    overlay = RowOverlay((), 0)
    overlay.use_table(TABLE)
    for name, token_id in (("good", 5), ("bad", 99)):
        overlay.announce(name, RowsInput(num_replaced=1))
        overlay.feed(name, RowsFeed(text=(text(0, 4, token_id),), final_length=2, tail_ids=(END, PAD)))
    assert {name: found.kind for name, found in overlay.take_findings().items()} == {"bad": "row_sequence"}
    embeds = embeddings(6)
    before = embeds.clone()
    overlay.apply(embeds, batch(("bad", 0, 2), ("good", 0, 4)))
    assert torch.equal(embeds[:2], before[:2])
    assert torch.equal(embeds[2], TABLE[4])
    assert torch.equal(embeds[3:], before[3:] + TABLE[[5, END, PAD]])


def test_any_cutting_and_any_mixture_gives_the_same_rows() -> None:
    random = np.random.default_rng(11)
    for _ in range(30):
        length = int(random.integers(1, 60))
        ids = np.where(random.random(length) < 0.5, random.integers(0, VOCABULARY, length), -1)
        wanted = torch.where(torch.from_numpy(ids < 0)[:, None], numbered(0, length), TABLE[ids])
        made, at = store(), 0
        while at < length:
            end = min(length, at + int(random.integers(1, 20)))
            media = [position for position in range(at, end) if ids[position] < 0]
            sent = RowsPayload(
                length,
                0,
                2,
                "float32",
                InlineBlock(numbered(0, length).numpy().tobytes()),
                tuple(Segment(position, 1, 8 * position) for position in media),
            )
            spoken = tuple(text(p, int(ids[p])) for p in range(at, end) if ids[p] >= 0)
            made.add("r", RowsFeed(sent if media else None, text=spoken))
            at = end
        assert torch.equal(rows(made, 0, length), wanted)


# -- rows that the model composes


def composed(first: int, *numbers: int) -> ComposedSegment:
    return ComposedSegment(first, len(numbers), bytes(numbers))


def twofold(data: bytes) -> torch.Tensor:
    """A row for each byte: that of its id, twice."""
    if max(data) >= VOCABULARY:
        raise ValueError(f"{max(data)} is no id")
    return 2 * TABLE[list(data)]


def test_rows_of_text_follow_a_composed_prompt() -> None:
    made = store()
    made.compose_rows = twofold
    made.add("r", RowsFeed(composed=(composed(0, 3, 1),), tail_ids=(END, PAD)))
    made.add("r", RowsFeed(text=(text(2, 7),), final_length=3))
    assert torch.equal(rows(made, 0, 6), torch.cat([2 * TABLE[[3, 1]], TABLE[[7, END, PAD, PAD]]]))


def test_a_tail_may_come_before_any_row() -> None:
    made = store()
    made.add("r", RowsFeed(tail_ids=(END, PAD)))
    made.add("r", RowsFeed(text=(text(0, 3),), final_length=1))
    assert torch.equal(rows(made, 0, 3), TABLE[[3, END, PAD]])


@pytest.mark.parametrize(
    ("segment", "compose", "detail"),
    [
        (composed(0, 99), twofold, "99 is no id"),
        (ComposedSegment(0, 3, bytes([1, 2])), twofold, "2 rows were composed instead of 3"),
        (composed(0, 1), None, "this stage's model composes none"),
    ],
)
def test_rows_that_cannot_be_composed_end_their_request_and_no_other(
    segment: ComposedSegment, compose: Callable[[bytes], torch.Tensor] | None, detail: str
) -> None:
    overlay = RowOverlay((), 0)
    overlay.use_table(TABLE)
    overlay.compose_rows = compose
    for name, feed in (("bad", RowsFeed(composed=(segment,))), ("good", RowsFeed(text=(text(0, 4),)))):
        overlay.announce(name, RowsInput(num_replaced=1))
        overlay.feed(name, feed)
    found = overlay.take_findings()
    assert list(found) == ["bad"]
    assert detail in found["bad"].detail
    assert torch.equal(stored_rows(overlay, "good", 0, 1), TABLE[[4]])


# -- the scheduler's count


def tracker() -> FeedTracker:
    made = FeedTracker(())
    made.announce("r")
    return made


def test_the_scheduler_counts_rows_of_text() -> None:
    made = tracker()
    assert made.take("r", RowsFeed(composed=(composed(0, 1),), text=(text(1, 4),))) is None
    assert made.take("r", RowsFeed(payload(2, numbered(2, 3)), text=(text(5, 6),))) is None
    assert [made.has_row("r", position) for position in (5, 6)] == [True, False]
    assert made.take("r", RowsFeed(final_length=6)) is None
    assert made.has_row("r", 6)
    assert len(made.take_pending()) == 3


@pytest.mark.parametrize(
    "feed",
    [
        RowsFeed(text=(text(1, 3),)),
        RowsFeed(text=(text(0, 3), text(2, 4))),
        RowsFeed(payload(1, numbered(1, 2)), text=(text(0, 3, 4),)),
        RowsFeed(payload(2, numbered(2, 1)), text=(text(0, 3),)),
    ],
)
def test_gaps_and_overlaps_are_found_by_the_scheduler(feed: RowsFeed) -> None:
    made = tracker()
    assert "rows were received" in str(made.take("r", feed))
    assert len(made) == 0
    assert not made.has_pending


def test_more_rows_than_have_come_cannot_be_the_end() -> None:
    assert tracker().take("r", RowsFeed(text=(text(0, 3),), final_length=2)) == "received 1 of 2 rows"
