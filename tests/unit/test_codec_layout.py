"""Where the frames of a stream begin in its waveform."""

import pytest

from omni_server.config.chunk_plan import ChunkPlan
from omni_server.family.codec import CodecLayout
from omni_server.orchestrator.speech_scheduler import WindowRamp

LEADING = CodecLayout(frames_per_block=2, samples_per_frame=100, sample_rate_hz=1000, lead_samples=30)


def test_frames_begin_at_multiples_of_their_length() -> None:
    layout = CodecLayout(frames_per_block=2, samples_per_frame=100)
    assert [layout.first_sample(frame) for frame in range(3)] == [0, 100, 200]


def test_with_a_lead_all_frames_but_the_first_begin_earlier() -> None:
    assert [LEADING.first_sample(frame) for frame in range(4)] == [0, 70, 170, 270]


def test_windows_are_due_where_their_audio_begins() -> None:
    ramp = WindowRamp(ChunkPlan(past_blocks=0, future_blocks=0), LEADING, (1, 2))
    assert [ramp.start_s(number) for number in range(3)] == [0, 0.17, 0.57]


@pytest.mark.parametrize("lead_samples", [-1, 100])
def test_a_frame_has_some_audio(lead_samples: int) -> None:
    with pytest.raises(ValueError, match=f"lead_samples is {lead_samples}"):
        CodecLayout(frames_per_block=2, samples_per_frame=100, lead_samples=lead_samples)
