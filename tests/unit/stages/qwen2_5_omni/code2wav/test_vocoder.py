"""The vocoder's crops against transformers' whole-utterance waveform, and how far a stream of windows is from
it."""

from collections.abc import Callable

import pytest
import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from stages.codec_chunking import CodecChunker
from stages.qwen2_5_omni.code2wav.noise import noise_frames
from stages.qwen2_5_omni.code2wav.packing import MelJob
from stages.qwen2_5_omni.code2wav.sampler import MelSampler
from stages.qwen2_5_omni.code2wav.vocoder import MelCrop, PlainVocoder, mel_crop
from stages.qwen2_5_omni.code2wav.voices import Voice
from stages.qwen2_5_omni.codec_window import CodecWindow
from stages.qwen2_5_omni.options import Code2WavChunks
from stages.qwen2_5_omni.talker_to_code2wav import codec_window

Codes = Callable[[int, int], torch.Tensor]
Inject = Callable[[torch.Tensor], None]
MakeSampler = Callable[..., MelSampler]
SEED = 9


def snr_db(result: torch.Tensor, reference: torch.Tensor) -> float:
    assert result.shape == reference.shape
    return float(10 * torch.log10(reference.square().sum() / (result - reference).square().sum()))


def window(
    *, emit_start: int, emit_end: int, first_code: int = 0, margin: int = 20, last: bool = False
) -> CodecWindow:
    return CodecWindow("Ethan", SEED, first_code, emit_start, emit_end, margin, last)


@pytest.fixture(scope="module")
def mel() -> torch.Tensor:
    return -4.5 + torch.randn(240, 80, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
@pytest.mark.parametrize("num_codes", [1, 2, 60])
def test_a_whole_utterance_equals_the_reference(
    token2wav: Qwen2_5OmniToken2WavModel,
    voices: tuple[Voice, Voice],
    random_codes: Codes,
    inject_noise: Inject,
    make_sampler: MakeSampler,
    num_codes: int,
) -> None:
    codes, voice = random_codes(num_codes, 3), voices[0]
    noise = torch.from_numpy(noise_frames(SEED, 0, 2 * num_codes, 80))
    (mel,) = make_sampler().sample([MelJob(codes, noise, 0)])
    crop = mel_crop(window(emit_start=0, emit_end=num_codes, last=True), mel, 2)
    (waveform,) = PlainVocoder(token2wav.code2wav_bigvgan_model).synthesize([crop])
    inject_noise(noise[None])
    reference = token2wav(codes[None], voice.conditioning, voice.reference_mel)
    assert waveform.shape == (480 * num_codes,)
    assert snr_db(waveform, reference) > 60
    assert 0.01 < float(reference.square().mean().sqrt()) < 0.9


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
    vocoder = PlainVocoder(token2wav.code2wav_bigvgan_model)
    whole = token2wav.code2wav_bigvgan_model(mel.T[None])
    for start, end in ((0, 24), (96, 144), (200, 240)):
        first, last = max(0, start - margin), min(240, end + margin)
        crop = MelCrop(mel[first:last], start - first, end - start, is_first=first == 0, is_last=last == 240)
        (waveform,) = vocoder.synthesize([crop])
        assert snr_db(waveform, whole[240 * start : 240 * end]) > least_db
        bare = vocoder.synthesize([MelCrop(mel[start:end], 0, end - start, start == 0, end == 240)])[0]
        assert snr_db(bare, whole[240 * start : 240 * end]) < 30


@torch.no_grad()
def test_crops_of_mixed_lengths_together_equal_each_alone(
    token2wav: Qwen2_5OmniToken2WavModel, mel: torch.Tensor
) -> None:
    vocoder = PlainVocoder(token2wav.code2wav_bigvgan_model)
    spans = ((0, 44, 0, 24), (28, 116, 20, 48), (100, 144, 20, 10), (52, 140, 20, 48))
    crops = [MelCrop(mel[start:end], skip, keep, start == 0, False) for start, end, skip, keep in spans]
    together = vocoder.synthesize(crops)
    for crop, waveform in zip(crops, together, strict=True):
        assert waveform.shape == (240 * crop.keep,)
        assert snr_db(waveform, vocoder.synthesize([crop])[0]) > 100


@torch.no_grad()
def stream(
    token2wav: Qwen2_5OmniToken2WavModel, sampler: MelSampler, codes: torch.Tensor, plan: Code2WavChunks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Waveform and mel spectrogram of `codes` as cut by `plan`."""
    vocoder = PlainVocoder(token2wav.code2wav_bigvgan_model)
    chunker = CodecChunker(plan, 12)
    waveforms, mels = [], []
    for piece in [*chunker.push(codes.tolist()), *chunker.finish()]:
        span = codec_window(piece, plan, voice="Ethan", noise_seed=SEED)
        span.validate(len(piece.frames), codes_per_block=12, frames_per_code=2)
        noise = torch.from_numpy(noise_frames(SEED, 2 * piece.first_frame, 2 * len(piece.frames), 80))
        (mel,) = sampler.sample([MelJob(torch.tensor(piece.frames), noise, 0)])
        crop = mel_crop(span, mel, 2)
        waveforms += vocoder.synthesize([crop])
        mels.append(crop.mel[crop.skip :][: crop.keep])
    return torch.cat(waveforms), torch.cat(mels)


def test_streamed_windows_are_close_to_the_whole_utterance(
    token2wav: Qwen2_5OmniToken2WavModel, random_codes: Codes, make_sampler: MakeSampler
) -> None:
    """Measured on these random weights, 203 codes, against one pass over all of them (mel: root mean square
    of the difference of log amplitudes):

    past / new / future blocks, margin | waveform SNR | mel 2 / 2 / 1, 20 frames (the default) | 47.3 dB |
    0.0004 dB 4 / 2 / 2, 20 frames | 92.5 dB | 3e-6 dB 2 / 2 / 0, none | 10.0 dB | 0.05 dB

    With trained weights the deviation has not been measured.
    """
    codes, sampler = random_codes(203, 0), make_sampler()
    whole, whole_mel = stream(token2wav, sampler, codes, Code2WavChunks(mode="whole"))

    def deviation(plan: Code2WavChunks) -> tuple[float, float]:
        waveform, mel = stream(token2wav, sampler, codes, plan)
        log_amplitude_to_db = 20 / torch.log(torch.tensor(10.0))
        return snr_db(waveform, whole), float((mel - whole_mel).square().mean().sqrt() * log_amplitude_to_db)

    snr, mel_db = deviation(Code2WavChunks())
    assert snr > 40
    assert mel_db < 0.002
    snr, mel_db = deviation(Code2WavChunks(past_blocks=4, future_blocks=2))
    assert snr > 80
    assert mel_db < 2e-5
    snr, mel_db = deviation(Code2WavChunks(future_blocks=0, vocoder_margin_frames=0))
    assert snr < 20
    assert mel_db > 0.01
