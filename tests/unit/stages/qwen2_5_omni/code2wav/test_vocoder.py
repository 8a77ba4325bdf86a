"""The vocoder's crops against transformers' whole-utterance waveform."""

import pytest
import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from stages.qwen2_5_omni.code2wav.vocoder import MelCrop, Vocoder, mel_crop
from stages.qwen2_5_omni.codec_window import CodecWindow


def snr_db(result: torch.Tensor, reference: torch.Tensor) -> float:
    assert result.shape == reference.shape
    return float(10 * torch.log10(reference.square().sum() / (result - reference).square().sum()))


def window(
    *, emit_start: int, emit_end: int, first_code: int = 0, margin: int = 20, last: bool = False
) -> CodecWindow:
    return CodecWindow("Ethan", 9, first_code, emit_start, emit_end, margin, last)


@pytest.fixture(scope="module")
def mel() -> torch.Tensor:
    return -4.5 + torch.randn(240, 80, generator=torch.Generator().manual_seed(2))


def test_the_crop_has_the_margin_where_the_window_has_it() -> None:
    def crop(window: CodecWindow, num_codes: int) -> tuple[int, int, int, int, bool, bool]:
        """First frame and end of the crop, and its other fields."""
        frames = torch.arange(2 * num_codes)[:, None]
        crop = mel_crop(window, frames, 2)
        first, last = int(crop.mel[0]), int(crop.mel[-1])
        return first, last + 1, crop.skip, crop.keep, crop.is_first, crop.is_last

    assert crop(window(first_code=12, emit_start=36, emit_end=60), 60) == (28, 116, 20, 48, False, False)
    assert crop(window(emit_start=0, emit_end=12), 24) == (0, 44, 0, 24, True, False)
    assert crop(window(emit_start=4, emit_end=12, last=True), 12) == (0, 24, 8, 16, True, True)


@torch.no_grad()
@pytest.mark.parametrize(("margin", "least_db"), [(20, 60.0), (28, 100.0)])
def test_a_crop_with_margin_equals_that_part_of_the_whole(
    token2wav: Qwen2_5OmniToken2WavModel, mel: torch.Tensor, margin: int, least_db: float
) -> None:
    vocoder = Vocoder(token2wav.code2wav_bigvgan_model)
    whole = token2wav.code2wav_bigvgan_model(mel.T[None])
    for start, end in ((0, 24), (96, 144), (200, 240)):
        first, last = max(0, start - margin), min(240, end + margin)
        crop = MelCrop(mel[first:last], start - first, end - start, is_first=first == 0, is_last=last == 240)
        (waveform,) = vocoder.synthesize([crop])
        assert snr_db(waveform, whole[240 * start : 240 * end]) > least_db
        bare = vocoder.synthesize([MelCrop(mel[start:end], 0, end - start, start == 0, end == 240)])[0]
        assert snr_db(bare, whole[240 * start : 240 * end]) < 30
