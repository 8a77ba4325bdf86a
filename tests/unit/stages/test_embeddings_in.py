"""Rows laid over the input embeddings by absolute position."""

import msgspec
import numpy as np
import pytest
import torch

from omni_server.protocol.corruption import Corruption
from omni_server.protocol.rows import InlineBlock, RowsFeed, RowsInput
from stages.runtime.embeddings_in import RowOverlay
from stages.runtime.fractional_positions import unpacked
from stages.runtime.stage_step import StepBatch
from tests.unit.stages.test_embedding_store import TAIL, numbered, payload

NUM_REPLACED = 4


def batch(*parts: tuple[str, int, int]) -> StepBatch:
    """(request id, first position, count) of each request, one behind the other."""
    counts = np.array([count for _, _, count in parts], np.int64)
    return StepBatch(
        [request_id for request_id, _, _ in parts],
        np.array([first for _, first, _ in parts], np.int64),
        counts,
        np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64),
    )


def embeddings(num_tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num_tokens, 2, generator=torch.Generator().manual_seed(num_tokens)).to(dtype)


def overlay(*requests: str, num_rows: int = 10, is_final: bool = True) -> RowOverlay:
    made = RowOverlay((), 0)
    for request_id in requests:
        made.feed(request_id, RowsFeed(payload(0, numbered(0, num_rows), tail=TAIL)))
        made.announce(request_id, RowsInput(num_replaced=NUM_REPLACED))
        if is_final:
            made.feed(request_id, RowsFeed(final_length=num_rows))
    return made


def test_the_limit_may_lie_inside_a_chunk_or_between_two() -> None:
    source = embeddings(8)
    for cuts in ([8], [4, 4], [3, 5], [1, 2, 3, 2], [5, 3]):
        made, position, pieces = overlay("a"), 0, []
        for count in cuts:
            piece = source[position : position + count].clone()
            made.apply(piece, batch(("a", position, count)))
            pieces.append(piece)
            position += count
        together = torch.cat(pieces)
        assert torch.equal(together[:4], numbered(0, 4))
        assert torch.equal(together[4:], source[4:] + numbered(4, 4))


def test_tail_rows_are_added_behind_the_last_row() -> None:
    embeds = embeddings(4)
    before = embeds.clone()
    overlay("a").apply(embeds, batch(("a", 9, 4)))
    assert torch.equal(embeds, before + torch.cat([numbered(9, 1), TAIL[[0, 1, 1]]]))


def test_requests_that_are_not_fed_and_padding_stay_as_they_are() -> None:
    embeds = embeddings(9)
    before = embeds.clone()
    overlay("fed").apply(embeds, batch(("other", 0, 3), ("fed", 5, 2), ("another", 7, 1)))
    assert torch.equal(embeds[3:5], before[3:5] + numbered(5, 2))
    untouched = [0, 1, 2, 5, 6, 7, 8]
    assert torch.equal(embeds[untouched], before[untouched])


def test_what_stood_at_a_replaced_position_does_not_matter() -> None:
    embeds = torch.full((4, 2), torch.nan)
    overlay("a").apply(embeds, batch(("a", 0, 4)))
    assert torch.equal(embeds, numbered(0, 4))


def test_a_missing_row_is_told_and_leaves_the_others_of_the_step_as_they_are() -> None:
    made = overlay("a", "b", is_final=False)
    embeds = embeddings(3)
    before = embeds.clone()
    made.apply(embeds, batch(("a", 10, 1), ("b", 8, 2)))
    assert torch.equal(embeds[1:], before[1:] + numbered(8, 2))
    assert made.has_findings
    assert made.take_findings() == {
        "a": Corruption("row_sequence", "the row of position 10 has not come (10 have)")
    }
    assert not made.has_findings


@pytest.mark.parametrize(
    ("feed", "detail"),
    [
        (RowsFeed(payload(11, numbered(11, 1))), "rows from position 11, but 10 rows are there"),
        (RowsFeed(payload(9, numbered(9, 2))), "rows from position 9, but 10 rows are there"),
        (RowsFeed(payload(10, numbered(10, 1)[:, :1])), "rows of 1 float32 after rows of (2, 'float32')"),
        (
            RowsFeed(payload(10, numbered(10, 1).bfloat16(), dtype="bfloat16")),
            "rows of 2 bfloat16 after rows of",
        ),
        (RowsFeed(final_length=11), "received 10 of 11 rows"),
        (
            RowsFeed(msgspec.structs.replace(payload(10, numbered(10, 1)), block=InlineBlock(b"123"))),
            "1 rows from byte 0 on of 3",
        ),
    ],
    ids=["a gap", "twice", "another width", "another type", "too few", "cut off"],
)
def test_rows_that_cannot_be_right_end_their_request_and_no_other(feed: RowsFeed, detail: str) -> None:
    made = overlay("a", "b", is_final=False)
    made.feed("a", feed)
    made.feed("b", RowsFeed(payload(10, numbered(10, 1))))
    made.feed("a", RowsFeed(payload(10, numbered(10, 1))))  # what was on its way
    made.announce("a", RowsInput(num_replaced=2))
    (found,) = made.take_findings().items()
    assert found[0] == "a"
    assert found[1].kind == "row_sequence"
    assert detail in found[1].detail
    embeds = embeddings(2)
    before = embeds.clone()
    made.apply(embeds, batch(("a", 10, 1), ("b", 10, 1)))
    assert torch.equal(embeds[0], before[0])
    assert torch.equal(embeds[1:], before[1:] + numbered(10, 1))
    assert not made.has_findings
    made.remove("a")
    made.feed("a", RowsFeed(payload(0, numbered(0, 3))))  # another request
    assert not made.has_findings
    assert len(made) == 2


def test_rows_may_come_before_the_announcement() -> None:
    made = RowOverlay((), 0)
    made.feed("a", RowsFeed(payload(0, numbered(0, 10))))
    made.announce("a", RowsInput(num_replaced=NUM_REPLACED))
    embeds = embeddings(4)
    made.apply(embeds, batch(("a", 0, 4)))
    assert torch.equal(embeds, numbered(0, 4))


def test_a_removed_request_holds_nothing_and_removing_an_unknown_one_is_harmless() -> None:
    made = overlay("a", "b")
    assert len(made) == 2
    made.remove("a")
    made.remove("never seen")
    assert len(made) == 1
    assert made.prompt_positions("a", 3) is None
    embeds = embeddings(2)
    before = embeds.clone()
    made.apply(embeds, batch(("a", 0, 2)))
    assert torch.equal(embeds, before)


def test_positions_come_with_the_rows() -> None:
    made = RowOverlay((), 0)
    given = torch.tensor([[0, 0, 1, 2.5], [0, 1, 1, 2.5], [0, 7, 1, 2.5]])
    made.feed("a", RowsFeed(payload(0, numbered(0, 3), positions=given)))
    found = made.prompt_positions("a", 5)
    assert found is not None
    positions, delta = found
    assert torch.equal(unpacked(positions), torch.cat([given, torch.tensor([[3.5]] * 3)], 1))
    assert unpacked(torch.tensor([5 + delta])) == 4.5  # below the greatest of all


@pytest.mark.parametrize(
    ("request_ids", "positions"), [(["a", "other"], [6, 6]), (["a", "b"], [6, NUM_REPLACED - 1])]
)
def test_there_are_no_added_rows_where_one_replaces_or_a_request_is_not_fed(
    request_ids: list[str], positions: list[int]
) -> None:
    made = overlay("a", "b")
    assert made.added_rows(request_ids, np.array(positions, np.int32), embeddings(2)) is None


def test_added_rows_that_have_not_come_are_told() -> None:
    made = overlay("a", is_final=False)
    assert made.added_rows(["a"], np.array([10], np.int32), embeddings(1)) is None
    assert [found.kind for found in made.take_findings().values()] == ["row_sequence"]


def test_a_request_in_the_place_of_one_that_has_ended_gets_its_own_rows() -> None:
    """They lie where those lay that were used last."""
    made = RowOverlay((), 0)
    for start in (0, 500):
        made.feed("a", RowsFeed(payload(0, numbered(start, 10))))
        made.announce("a", RowsInput(num_replaced=NUM_REPLACED))
        for _ in range(2):
            rows = made.added_rows(["a"], np.array([6], np.int32), embeddings(1))
            assert rows is not None
            assert torch.equal(rows, numbered(start + 6, 1))
        made.remove("a")


def test_rows_that_come_late_are_used_from_where_they_begin() -> None:
    made = overlay("a", is_final=False)
    first = made.added_rows(["a"], np.array([9], np.int32), embeddings(1))
    made.feed("a", RowsFeed(payload(10, numbered(10, 200))))
    assert first is not None
    for position in (10, 209, 9):
        rows = made.added_rows(["a"], np.array([position], np.int32), embeddings(1))
        assert rows is not None
        assert torch.equal(rows, numbered(position, 1))
