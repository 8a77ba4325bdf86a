"""What code2wav is told about the windows of an utterance."""

import pytest

from omni_server.errors import ConfigError
from omni_server.family.codec import DecoderWindow
from stages.qwen2_5_omni.codec_window import CodecWindow
from stages.qwen2_5_omni.options import Code2WavChunks
from stages.qwen2_5_omni.talker_to_code2wav import Code2WavLayout, TalkerToCode2Wav, check_margin

LAYOUT = Code2WavLayout(frames_per_block=12, samples_per_frame=480, mel_frames_per_code=2)
PLANS = [
    Code2WavChunks(),
    Code2WavChunks(past_blocks=0, vocoder_margin_frames=0, carry=False),
    Code2WavChunks(past_blocks=3, new_blocks=(2, 5), future_blocks=2),
    Code2WavChunks(new_blocks=(3, 1), vocoder_margin_frames=24),
    Code2WavChunks(mode="whole", past_blocks=0),
]


def windows(plan: Code2WavChunks, num_codes: int) -> list[DecoderWindow]:
    edge = TalkerToCode2Wav(plan, LAYOUT, voice="Ethan", noise_seed=2**64 - 1)
    return [*edge.push([(code,) for code in range(num_codes)]), *edge.finish()]


@pytest.mark.parametrize("plan", PLANS, ids=repr)
@pytest.mark.parametrize("num_codes", [1, 11, 12, 13, 24, 25, 60, 61, 203])
def test_code2wav_accepts_what_it_is_told(plan: Code2WavChunks, num_codes: int) -> None:
    for window in windows(plan, num_codes):
        told = CodecWindow.decode(window.payload)
        told.validate(len(window.token_ids), codes_per_block=12, frames_per_code=2)
        assert (told.voice, told.noise_seed) == ("Ethan", 2**64 - 1)
        assert told.vocoder_margin_frames == plan.vocoder_margin_frames
        assert (window.first_sample, window.num_samples) == (
            480 * told.emit_start,
            480 * (told.emit_end - told.emit_start),
        )


def test_the_windows_of_an_utterance_are_one_stream_where_state_is_carried() -> None:
    streams = [{CodecWindow.decode(w.payload).stream for w in windows(plan, 60)} for plan in PLANS[:2]]
    assert [len(names) for names in streams] == [1, 1]
    assert None not in streams[0]
    assert streams[1] == {None}


@pytest.mark.parametrize("name", ["past_blocks", "future_blocks"])
def test_a_plan_that_starves_the_vocoder_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"chunks\.{name} = 0 gives the vocoder 0 mel frames"):
        check_margin(Code2WavChunks.model_validate({name: 0}), LAYOUT)


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_a_plan_with_room_for_the_vocoder_is_accepted(plan: Code2WavChunks) -> None:
    check_margin(plan, LAYOUT)
