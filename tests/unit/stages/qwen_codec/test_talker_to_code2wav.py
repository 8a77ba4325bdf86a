"""What code2wav is told about the windows of a speech stream, and what the scheduler expects of them."""

import pytest

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.errors import ConfigError
from omni_server.family.codec import DecoderWindow, Frame
from omni_server.orchestrator.speech_scheduler import WindowRamp
from stages.qwen_codec.codec_layout import code2wav_layout
from stages.qwen_codec.codec_window import CodecWindow
from stages.qwen_codec.talker_to_code2wav import TalkerToCode2Wav, check_plan

LAYOUT = code2wav_layout(
    {
        "num_hidden_layers": 2,
        "sliding_window": 12,
        "upsampling_ratios": (2, 2),
        "upsample_rates": (8, 5, 4, 3),
    }
)
RAMPS = [(1,), (2,), (8,), (1, 2, 4, 8), (1, 1, 2, 4, 8), (4, 1, 3), (10, 25), (60,), (61,)]
NUM_FRAMES = [1, 2, 3, 8, 15, 60, 61]


def frames_of(num_frames: int) -> list[Frame]:
    return [tuple((97 * number + 131 * book) % 2048 for book in range(16)) for number in range(num_frames)]


def plan_of(ramp: tuple[int, ...], **others: object) -> ChunkPlan:
    return ChunkPlan.model_validate({"past_blocks": 0, "future_blocks": 0, "new_blocks": ramp} | others)


def edge_for(plan: ChunkPlan) -> TalkerToCode2Wav:
    return TalkerToCode2Wav(plan, LAYOUT, voice="ethan", noise_seed=0)


def windows(plan: ChunkPlan, frames: list[Frame]) -> list[DecoderWindow]:
    edge = edge_for(plan)
    return [*edge.push(frames[:5]), *edge.push(frames[5:]), *edge.finish()]


def told(window: DecoderWindow) -> CodecWindow:
    return CodecWindow.decode(window.payload)


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
@pytest.mark.parametrize("num_frames", NUM_FRAMES)
@pytest.mark.parametrize("mode", ["windows", "whole"])
def test_windows_cover_all_frames_and_samples_once(ramp: tuple[int, ...], num_frames: int, mode: str) -> None:
    next_frame, next_sample, frames = 0, 0, frames_of(num_frames)
    for window in windows(plan_of(ramp, mode=mode), frames):
        assert told(window).first_frame == next_frame
        assert told(window).is_first == (next_frame == 0)
        assert window.first_sample == next_sample
        size = len(window.token_ids) // 16
        assert window.num_computed == size
        assert window.num_samples == 1920 * size - (0 if next_frame else 555)
        assert window.token_ids == sum(frames[next_frame : next_frame + size], ())
        assert window.is_varied == (size > 1)
        next_frame += size
        next_sample += window.num_samples
    assert (next_frame, next_sample) == (num_frames, 1920 * num_frames - 555)


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
def test_code2wav_accepts_what_it_is_told(ramp: tuple[int, ...]) -> None:
    frames = frames_of(61)
    for window in windows(plan_of(ramp), frames):
        metadata = told(window)
        metadata.validate(len(window.token_ids), num_codebooks=16, context_frames=LAYOUT.context_frames)
        past = metadata.past_codes().reshape(-1, 16).tolist()
        first = max(0, metadata.first_frame - LAYOUT.context_frames)
        assert past == [list(frame) for frame in frames[first : metadata.first_frame]]


def test_the_first_window_of_a_cloned_voice_begins_after_the_frames_of_the_voice() -> None:
    voice = frames_of(5)
    edge = TalkerToCode2Wav(plan_of((1,)), LAYOUT, voice="ada", noise_seed=0, past=voice)
    first, second = map(told, [*edge.push(frames_of(2)), *edge.finish()])
    assert [(window.first_frame, window.is_first) for window in (first, second)] == [(5, True), (6, False)]
    assert first.past_codes().reshape(-1, 16).tolist() == [list(frame) for frame in voice]


def test_windows_of_a_stream_have_one_name_and_streams_have_different_ones() -> None:
    names = [{told(window).stream for window in windows(plan_of((1, 2)), frames_of(20))} for _ in range(2)]
    assert [len(name) for name in names] == [1, 1]
    assert names[0] != names[1]


def test_the_last_window_says_so_and_no_other() -> None:
    assert [told(window).is_last for window in windows(plan_of((4,)), frames_of(10))] == [False, False, True]
    assert [told(window).is_last for window in windows(plan_of((4,), mode="whole"), frames_of(10))] == [True]


@pytest.mark.parametrize("ramp", RAMPS, ids=str)
@pytest.mark.parametrize("other", [None, (3, 2)])
def test_a_ramp_says_what_the_edge_does(ramp: tuple[int, ...], other: tuple[int, ...] | None) -> None:
    plan = plan_of(ramp)
    expected = WindowRamp(plan, LAYOUT, used := ramp if other is None else other)
    edge, number, end = edge_for(plan), 0, 0
    edge.use_ramp(used)
    for made, frame in enumerate(frames_of(200), 1):
        for window in edge.push([frame]):
            assert made == expected.needed_frames(number)
            assert window.first_sample == end == round(expected.start_s(number) * 24_000)
            assert window.num_computed == expected.computed_frames(number)
            end += window.num_samples
            number += 1
    assert number >= 3
    assert end == round(expected.start_s(number) * 24_000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"past_blocks": 2}, r"chunks\.past_blocks is 2, but this decoder uses none: set it to 0"),
        ({"future_blocks": 1}, r"chunks\.future_blocks is 1"),
        ({"carry": False}, r"chunks\.carry is false, but this decoder needs the state"),
    ],
)
def test_a_plan_that_the_decoder_cannot_follow_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        edge_for(plan_of((1,), **change))


def test_without_windows_there_is_no_context_to_refuse() -> None:
    check_plan(ChunkPlan(mode="whole"))
