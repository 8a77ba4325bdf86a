"""Slots: who has one, who finds its state, and who loses it."""

import pytest
import torch

from stages.qwen2_5_omni.code2wav.packing import Carry
from stages.qwen2_5_omni.code2wav.streams import StreamTable
from stages.qwen2_5_omni.codec_window import CodecWindow

BLOCK = 12


def table(num_slots: int) -> StreamTable:
    return StreamTable(num_slots, codes_per_block=BLOCK, frames_per_code=2)


def window(
    stream: str | None,
    start: int,
    end: int,
    *,
    first: int | None = None,
    margin: int = 20,
    last: bool = False,
) -> CodecWindow:
    """From block `start` to block `end`; with two blocks before it unless `first` says otherwise."""
    first = max(0, start - 2) if first is None else first
    return CodecWindow("Ethan", 0, first * BLOCK, start * BLOCK, end * BLOCK, margin, last, stream)


def tail(visit: Carry | None, value: float = 0.0, num_frames: int = 20) -> torch.Tensor | None:
    return None if visit is None or visit.kept_block is None else torch.full((num_frames, 80), value)


def step(streams: StreamTable, *windows: CodecWindow) -> list[Carry | None]:
    """A batch that succeeds."""
    visits = streams.enter(windows)
    streams.leave(windows, visits, [tail(visit) for visit in visits])
    return visits


def reads(visits: list[Carry | None]) -> list[bool]:
    return [visit is not None and visit.is_read for visit in visits]


def test_the_kept_block_is_counted_from_the_first_that_is_computed() -> None:
    [lost] = table(1).enter([window("a", 3, 5)])
    assert lost is not None
    assert lost == Carry(0, is_read=False, kept_block=3), "two past blocks and two new ones"


def test_the_stream_whose_last_window_is_the_longest_ago_makes_room() -> None:
    streams = table(2)
    step(streams, window("a", 0, 1))
    step(streams, window("b", 0, 1))
    step(streams, window("a", 1, 2))
    step(streams, window("c", 0, 1))
    assert reads(step(streams, window("a", 2, 3))) == [True]
    assert reads(step(streams, window("b", 1, 2))) == [False], "it was b's, and c's is the oldest now"
    assert reads(step(streams, window("b", 2, 3), window("a", 3, 4))) == [True, True]
    assert reads(step(streams, window("c", 1, 2))) == [False]
    assert (len(streams.states), len(streams.free_slots)) == (2, 0)


def test_a_window_of_the_batch_never_loses_its_slot_to_another_one_of_it() -> None:
    streams = table(2)
    step(streams, window("a", 0, 1), window("b", 0, 1))
    visits = step(streams, window("new", 0, 1), window("a", 1, 2), window("b", 1, 2))
    assert visits[0] is None, "there is no place for it"
    assert reads(visits) == [False, True, True]
    assert reads(step(streams, window("new", 1, 2), window("a", 2, 3))) == [False, True]
    assert reads(step(streams, window("new", 2, 3))) == [True], "b made room"


@pytest.mark.parametrize(
    "next_window",
    [window("a", 2, 3), window("a", 0, 1), window("a", 1, 2, margin=28)],
    ids=["a gap", "from the beginning", "more margin than was kept"],
)
def test_a_window_that_does_not_continue_what_was_kept_does_not_read_it(next_window: CodecWindow) -> None:
    streams = table(1)
    first = window("a", 0, 1, margin=8)
    visits = streams.enter([first])
    streams.leave([first], visits, [tail(visits[0], num_frames=8)])
    assert reads(step(streams, next_window)) == [False]
    assert (len(streams.states), len(streams.free_slots)) == (1, 0)


def test_a_last_window_that_finds_nothing_it_can_read_frees_the_slot() -> None:
    streams = table(1)
    step(streams, window("a", 0, 1))
    assert step(streams, window("a", 3, 4, last=True)) == [None]
    assert (len(streams.states), len(streams.free_slots)) == (0, 1)


def test_what_a_failed_batch_may_have_overwritten_is_forgotten() -> None:
    streams = table(3)
    step(streams, window("a", 0, 1), window("b", 0, 1))
    streams.abandon(streams.enter([window("a", 1, 2), window("c", 0, 1), window(None, 0, 1)]))
    assert (len(streams.states), len(streams.free_slots)) == (1, 2)
    assert reads(step(streams, window("a", 1, 2), window("b", 1, 2))) == [False, True]
