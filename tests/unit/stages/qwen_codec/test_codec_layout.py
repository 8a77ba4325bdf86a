"""The numbers that follow from the config; that audio agrees with them is in
code2wav/test_stream_decoder.py."""

import pytest

from stages.qwen3_tts.codec_layout import decoder_layout
from stages.qwen_codec.codec_layout import Code2WavLayout, code2wav_layout

PUBLISHED = {
    "num_hidden_layers": 8,
    "sliding_window": 72,
    "upsampling_ratios": (2, 2),
    "upsample_rates": (8, 5, 4, 3),
}


@pytest.mark.parametrize(
    ("layout", "lead_samples", "context_frames"),
    [(code2wav_layout(PUBLISHED), 555, 578), (decoder_layout(PUBLISHED), 0, 580)],
    ids=["qwen3_omni", "qwen3_tts"],
)
def test_the_published_checkpoints_layouts(
    layout: Code2WavLayout, lead_samples: int, context_frames: int
) -> None:
    assert layout == Code2WavLayout(
        frames_per_block=1,
        samples_per_frame=1920,
        sample_rate_hz=24_000,
        lead_samples=lead_samples,
        context_frames=context_frames,
    )


def test_rates_that_leave_nothing_of_the_first_frame_are_refused() -> None:
    with pytest.raises(ValueError, match="lead_samples is 6; it must be less than samples_per_frame, 4"):
        code2wav_layout(
            {"num_hidden_layers": 1, "sliding_window": 4, "upsampling_ratios": (), "upsample_rates": (2, 2)}
        )
