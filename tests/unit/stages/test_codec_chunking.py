"""Windows of codec tokens."""

import random
from weakref import WeakSet

import pytest

from omni_server.config.chunk_plan import ChunkPlan
from stages.codec_chunking import CodecChunker, Window

BLOCK = 12
PLANS = [
    ChunkPlan(),
    ChunkPlan(past_blocks=0),
    ChunkPlan(past_blocks=3, new_blocks=(2, 5), future_blocks=2),
    ChunkPlan(future_blocks=0),
    ChunkPlan(new_blocks=(3, 1)),
    ChunkPlan(past_blocks=5, new_blocks=(1,)),
    ChunkPlan(mode="whole"),
]


class Code:
    """Can be observed after nothing else refers to it."""


def windows_of(plan: ChunkPlan, frames: list[int], portions: list[int]) -> list[Window[int]]:
    """Push `frames` in the given portions."""
    chunker, windows, start = CodecChunker[int](plan, BLOCK), list[Window[int]](), 0
    for size in portions:
        windows += chunker.push(frames[start : start + size])
        start += size
    return [*windows, *chunker.push(frames[start:]), *chunker.finish()]


@pytest.mark.parametrize("plan", PLANS, ids=repr)
@pytest.mark.parametrize("number", [1, 2, 11, 12, 13, 23, 24, 25, 36, 47, 48, 60, 61, 84, 203])
def test_windows_do_not_depend_on_how_codes_arrive_and_emit_each_code_once(
    plan: ChunkPlan, number: int
) -> None:
    rng = random.Random(number)
    codes = [rng.randrange(8193) for _ in range(number)]
    windows = windows_of(plan, codes, [])
    for _ in range(20):
        portions = [rng.choice([0, 1, 1, 2, 7, 12, 50]) for _ in range(rng.randrange(number + 1))]
        assert windows_of(plan, codes, portions) == windows

    emitted = 0
    for window in windows:
        assert window.emit_start == emitted < window.emit_end
        emitted = window.emit_end
        assert window.first_frame % BLOCK == 0
        assert window.frames == tuple(codes[window.first_frame :][: len(window.frames)])
        assert window.emitted == tuple(codes[window.emit_start : window.emit_end])
    assert emitted == number
    assert not any(window.is_last for window in windows[:-1])
    if plan.longest_window_blocks is not None:
        assert max(len(window.frames) for window in windows) <= plan.longest_window_blocks * BLOCK


def test_a_window_comes_as_soon_as_its_future_blocks_are_there() -> None:
    chunker = CodecChunker(ChunkPlan(new_blocks=(1, 2)), BLOCK)
    spans: list[tuple[int, int, int, int]] = []
    for count in range(1, 97):
        spans += [(count, w.first_frame, w.emit_start, w.emit_end) for w in chunker.push([count])]
    assert spans == [(24, 0, 0, 12), (48, 0, 12, 36), (72, 12, 36, 60), (96, 36, 60, 84)]
    (tail,) = chunker.finish()
    assert (tail.first_frame, tail.emit_start, tail.emit_end, tail.is_last) == (60, 84, 96, True)


def test_another_ramp_holds_from_the_first_window_and_not_after_it() -> None:
    chunker = CodecChunker(ChunkPlan(new_blocks=(1, 2)), BLOCK)
    chunker.use_ramp((3, 1))
    assert [w.emit_end for w in chunker.push(range(6 * BLOCK))] == [3 * BLOCK, 4 * BLOCK, 5 * BLOCK]
    with pytest.raises(ValueError, match="after the first window"):
        chunker.use_ramp((1,))


@pytest.mark.parametrize("ramp", [(1,), (1, 3), (4, 1)], ids=str)
def test_no_last_window_is_longer_than_the_full_one_in_its_place(ramp: tuple[int, ...]) -> None:
    plan = ChunkPlan(new_blocks=ramp)
    for number in range(1, 12 * BLOCK):
        windows = windows_of(plan, list(range(number)), [])
        new_blocks = ramp[min(len(windows) - 1, len(ramp) - 1)]
        assert len(windows[-1].frames) < (plan.past_blocks + new_blocks + plan.future_blocks) * BLOCK


def test_codes_are_held_no_longer_than_a_window_needs_them() -> None:
    chunker, held = CodecChunker[Code](ChunkPlan(), BLOCK), WeakSet[Code]()
    for _ in range(10_000):
        held.add(code := Code())
        chunker.push([code])
        assert len(held) < 11 * BLOCK


def test_whole_mode_waits_for_the_end_and_gives_one_window() -> None:
    chunker = CodecChunker(ChunkPlan(mode="whole"), BLOCK)
    assert chunker.push(range(500)) == []
    assert chunker.finish() == [Window(tuple(range(500)), 0, 0, 500, True)]


def test_codes_after_the_end_are_refused() -> None:
    chunker = CodecChunker(ChunkPlan(), BLOCK)
    chunker.finish()
    with pytest.raises(ValueError, match="after finish"):
        chunker.push([1])


@pytest.mark.parametrize("plan", PLANS, ids=repr)
@pytest.mark.parametrize("seed", range(10))
def test_pauses_shorten_windows_and_each_code_is_emitted_once(plan: ChunkPlan, seed: int) -> None:
    rng = random.Random(seed)
    codes = list(range(rng.randrange(300)))
    chunker, windows = CodecChunker[int](plan, BLOCK), list[Window[int]]()
    for code in codes:
        windows += chunker.push([code])
        if rng.random() < 0.1:
            windows += chunker.flush()
    windows += chunker.finish()
    assert [code for window in windows for code in window.emitted] == codes
    assert all(window.emit_start % BLOCK == 0 and window.first_frame % BLOCK == 0 for window in windows)
    for window in windows:
        assert window.frames == tuple(codes[window.first_frame :][: len(window.frames)])


def test_after_a_pause_windows_are_short_again() -> None:
    chunker = CodecChunker[int](ChunkPlan(new_blocks=(1, 2, 4), past_blocks=0, future_blocks=0), 1)
    ends = [window.emit_end for window in [*chunker.push(range(5)), *chunker.flush(), *chunker.flush()]]
    assert ends == [1, 3, 5]
    assert [window.emit_end for window in chunker.push(range(5, 12))] == [6, 8, 12]
