"""Windows of codec tokens."""

import random

import pytest

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.errors import ConfigError
from stages.codec_chunking import CodecChunker, Window, check_chunk_plan

BLOCK = 12
PLANS = [
    ChunkPlan(),
    ChunkPlan(past_blocks=0, vocoder_margin_frames=0),
    ChunkPlan(past_blocks=3, new_blocks=(2, 5), future_blocks=2),
    ChunkPlan(future_blocks=0, vocoder_margin_frames=0),
    ChunkPlan(new_blocks=(3, 1)),
    ChunkPlan(past_blocks=5, new_blocks=(1,)),
    ChunkPlan(mode="whole"),
]


def windows_of(plan: ChunkPlan, codes: list[int], portions: list[int]) -> list[Window]:
    """Push `codes` in the given portions, asking for windows after each."""
    chunker, windows, start = CodecChunker(plan, BLOCK), [], 0
    for size in portions:
        chunker.push(codes[start : start + size])
        windows += chunker.ready()
        start += size
    chunker.push(codes[start:])
    chunker.finish()
    windows += chunker.ready()
    assert chunker.ready() == []
    return windows


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
        assert window.first_code % BLOCK == 0
        assert window.codes == tuple(codes[window.first_code :][: len(window.codes)])
        window.span(voice="Ethan", noise_seed=0).validate(
            len(window.codes), codes_per_block=BLOCK, frames_per_code=2
        )
    assert emitted == number
    assert not any(window.is_last for window in windows[:-1])
    if plan.longest_window_blocks is not None:
        assert max(len(window.codes) for window in windows) <= plan.longest_window_blocks * BLOCK


def test_a_window_comes_as_soon_as_its_future_blocks_are_there() -> None:
    chunker = CodecChunker(ChunkPlan(new_blocks=(1, 2)), BLOCK)
    spans: list[tuple[int, int, int, int]] = []
    for count in range(1, 97):
        chunker.push([count])
        spans += [(count, w.first_code, w.emit_start, w.emit_end) for w in chunker.ready()]
    assert spans == [(24, 0, 0, 12), (48, 0, 12, 36), (72, 12, 36, 60), (96, 36, 60, 84)]
    chunker.finish()
    (tail,) = chunker.ready()
    assert (tail.first_code, tail.emit_start, tail.emit_end, tail.is_last) == (60, 84, 96, True)


def test_the_ramp_is_climbed_once_and_its_last_step_repeats() -> None:
    windows = windows_of(ChunkPlan(new_blocks=(1, 1, 2, 4)), list(range(20 * BLOCK + 5)), [])
    assert [(w.emit_end - w.emit_start) / BLOCK for w in windows[:-1]] == [1, 1, 2, 4, 4, 4]
    assert [w.emit_end for w in windows[-2:]] == [16 * BLOCK, 20 * BLOCK + 5]


def test_another_ramp_holds_from_the_first_window_and_not_after_it() -> None:
    chunker = CodecChunker(ChunkPlan(new_blocks=(1, 2)), BLOCK)
    chunker.use_ramp((3, 1))
    chunker.push(range(6 * BLOCK))
    assert [w.emit_end for w in chunker.ready()] == [3 * BLOCK, 4 * BLOCK, 5 * BLOCK]
    with pytest.raises(ValueError, match="after the first window"):
        chunker.use_ramp((1,))


@pytest.mark.parametrize("ramp", [(1,), (1, 3), (4, 1)], ids=str)
def test_no_last_window_is_longer_than_the_full_one_in_its_place(ramp: tuple[int, ...]) -> None:
    plan = ChunkPlan(new_blocks=ramp)
    for number in range(1, 12 * BLOCK):
        windows = windows_of(plan, list(range(number)), [])
        new_blocks = ramp[min(len(windows) - 1, len(ramp) - 1)]
        assert len(windows[-1].codes) < (plan.past_blocks + new_blocks + plan.future_blocks) * BLOCK


def test_codes_are_held_no_longer_than_a_window_needs_them() -> None:
    chunker = CodecChunker(ChunkPlan(), BLOCK)
    for code in range(10_000):
        chunker.push([code])
        chunker.ready()
        assert chunker.num_held_codes < 11 * BLOCK


def test_whole_mode_waits_for_the_end_and_gives_one_window() -> None:
    chunker = CodecChunker(ChunkPlan(mode="whole"), BLOCK)
    chunker.push(range(500))
    assert chunker.ready() == []
    chunker.finish()
    assert chunker.ready() == [Window(tuple(range(500)), 0, 0, 500, 20, True)]


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_no_codes_give_no_window(plan: ChunkPlan) -> None:
    chunker = CodecChunker(plan, BLOCK)
    chunker.finish()
    assert chunker.ready() == []


def test_codes_after_the_end_are_refused() -> None:
    chunker = CodecChunker(ChunkPlan(), BLOCK)
    chunker.finish()
    with pytest.raises(ValueError, match="after finish"):
        chunker.push([1])


def test_the_span_carries_voice_and_seed() -> None:
    span = windows_of(ChunkPlan(), [1, 2, 3], [])[0].span(voice="Ethan", noise_seed=2**64 - 1)
    assert (span.voice, span.noise_seed, span.emit_end, span.is_last) == ("Ethan", 2**64 - 1, 3, True)


@pytest.mark.parametrize("name", ["past_blocks", "future_blocks"])
def test_a_plan_that_starves_the_vocoder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"chunks\.{name} = 0 gives the vocoder 0 mel frames"):
        check_chunk_plan(ChunkPlan.model_validate({name: 0}), codes_per_block=BLOCK, frames_per_code=2)


@pytest.mark.parametrize(
    "plan",
    [ChunkPlan(), ChunkPlan(vocoder_margin_frames=24), ChunkPlan(mode="whole", past_blocks=0)],
    ids=repr,
)
def test_a_plan_with_room_for_the_vocoder_is_accepted(plan: ChunkPlan) -> None:
    check_chunk_plan(plan, codes_per_block=BLOCK, frames_per_code=2)
