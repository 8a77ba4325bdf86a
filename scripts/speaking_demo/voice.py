"""A robot's voice whose waveform is a local function of its mel spectrogram.

It keeps espeak-ng's smoothed spectral envelope and voicing, and renders the waveform again with one pulse per
mel frame (100 Hz, "Ethan") or two (200 Hz and higher formants, "Chelsie"), always at the same place of the
frame. So a small vocoder can learn it by regression, without a discriminator, and codes need no pitch.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torchaudio.functional import create_dct, melscale_fbanks, resample  # type: ignore[import-untyped]

SAMPLE_RATE_HZ = 24_000
HOP = 240
"""Samples per mel frame."""
NUM_MELS = 80
_FFT = 1024
_BINS = _FFT // 2 + 1

_FILTERS = melscale_fbanks(
    _BINS, 0.0, SAMPLE_RATE_HZ / 2, NUM_MELS, SAMPLE_RATE_HZ, norm="slaney", mel_scale="slaney"
)
_MEL_GAIN = 6.0
"""Puts the loudest bands just below what BigVGAN clips (ln 2.3)."""
_MEL_FLOOR = math.exp(-6.5)

_CEPSTRUM = create_dct(30, NUM_MELS, "ortho")
_VOICING_BANDS_HZ = ((60, 1000), (1000, 2500), (2500, 5000), (5000, 11000))
_VOICED_FROM = torch.tensor([0.35, 0.2, 0.0, 0.15])
"""Correlation with the previous period, per band, above which a band counts as voiced."""
_SILENCE = math.log(1e-10)


@dataclass(frozen=True)
class Speaker:
    pulses_per_frame: int
    formant_shift: float


SPEAKERS = {"Chelsie": Speaker(2, 1.14), "Ethan": Speaker(1, 1.0)}


@dataclass(frozen=True)
class Envelope:
    """What is said, without pitch."""

    log_power: torch.Tensor
    """Per mel band, smoothed; float32 [num_frames, NUM_MELS]."""
    voicing: torch.Tensor
    """Correlation with the previous period per band of `_VOICING_BANDS_HZ`; float32 [num_frames, 4]."""

    def __len__(self) -> int:
        return len(self.log_power)

    def voiced(self) -> torch.Tensor:
        """How voiced each band is, 0 to 1; all 0 if the lowest band is unvoiced."""
        share = ((self.voicing - _VOICED_FROM) / 0.3).clamp(0, 1)
        return share * (share[:, :1] > 0)


def silence(num_frames: int) -> Envelope:
    return Envelope(
        torch.full((num_frames, NUM_MELS), _SILENCE), torch.zeros(num_frames, len(_VOICING_BANDS_HZ))
    )


def join(parts: list[Envelope]) -> Envelope:
    return Envelope(
        torch.cat([part.log_power for part in parts]), torch.cat([part.voicing for part in parts])
    )


def pitch_of(samples: torch.Tensor, rate_hz: int) -> float:
    """Pitch of a monotone in Hz: the largest autocorrelation peak between 60 and 160 Hz."""
    x = resample(samples, rate_hz, SAMPLE_RATE_HZ)
    x = x - x.mean()
    correlation = torch.fft.irfft(torch.fft.rfft(x, 2 * len(x)).abs() ** 2)
    low, high = SAMPLE_RATE_HZ // 160, SAMPLE_RATE_HZ // 60
    lag = low + int(correlation[low:high].argmax())
    before, at, after = correlation[lag - 1 : lag + 2].tolist()
    return SAMPLE_RATE_HZ / (lag + (before - after) / (before - 2 * at + after) / 2)


def analyse(samples: torch.Tensor, rate_hz: int, pitch_hz: float) -> Envelope:
    """The envelope of one word, without the silence around it; an even number of frames."""
    x = resample(samples, rate_hz, SAMPLE_RATE_HZ)
    x = torch.nn.functional.pad(x, (2 * HOP, 2 * HOP + (-len(x)) % (2 * HOP)))
    num_frames = len(x) // HOP
    window = torch.hann_window(3 * HOP)
    power = torch.fft.rfft(_frames(x, window, num_frames), _FFT).abs().square() / window.square().sum()
    log_power = (power @ (_FILTERS / _FILTERS.sum(0))).clamp(min=1e-10).log() @ _CEPSTRUM @ _CEPSTRUM.T
    voicing = torch.stack([_voicing(x, band, pitch_hz, num_frames) for band in _VOICING_BANDS_HZ], 1)
    audible = (log_power.exp().mean(1) > 2e-6).nonzero().flatten()
    first, end = int(audible[0]), int(audible[-1]) + 1
    end += (end - first) % 2
    if end > num_frames:
        first, end = first - 1, end - 1
    return Envelope(log_power[first:end], voicing[first:end])


def render(envelope: Envelope, speaker: Speaker, seed: int = 0) -> torch.Tensor:
    """The waveform, float32 [num_frames * HOP]. `seed` seeds the noise of unvoiced parts."""
    amplitude = (_to_bins(envelope.log_power, speaker.formant_shift) / 2).clamp(min=math.log(3e-5))
    voiced = envelope.voiced()
    share = _share_per_bin(voiced)
    wave = _pulses(amplitude, share, voiced[:, 0] > 0, speaker.pulses_per_frame)
    wave = wave + _noise(amplitude, share, seed)
    return wave * min(1.0, 0.97 / float(wave.abs().max().clamp(min=1e-6)))


def mel_of(wave: torch.Tensor) -> torch.Tensor:
    """Log mel spectrogram, float32 [num_frames, NUM_MELS]; frame i is centred on samples i * HOP to (i + 1) *
    HOP."""
    spectrum = torch.fft.rfft(_frames(wave, torch.hann_window(_FFT), len(wave) // HOP), _FFT).abs()
    return (spectrum @ _FILTERS * _MEL_GAIN).clamp(min=_MEL_FLOOR).log()


def features(envelope: Envelope, loudest: float) -> torch.Tensor:
    """Features to cluster: smoothed envelope and voicing per pair of frames, float32 [num_frames / 2, 48].

    `loudest`: the log power that counts as full scale.
    """
    cepstrum = (envelope.log_power - loudest).clamp(-18, 0) / 2 @ _CEPSTRUM[:, :20]
    return torch.cat([cepstrum, 2 * envelope.voiced()], 1).reshape(len(envelope) // 2, -1)


def _frames(x: torch.Tensor, window: torch.Tensor, num_frames: int) -> torch.Tensor:
    width = len(window)
    x = torch.nn.functional.pad(x, ((width - HOP) // 2, width))
    return x.unfold(0, width, HOP)[:num_frames] * window


def _voicing(x: torch.Tensor, band_hz: tuple[int, int], pitch_hz: float, num_frames: int) -> torch.Tensor:
    frequencies = torch.fft.rfftfreq(len(x), 1 / SAMPLE_RATE_HZ)
    spectrum = torch.fft.rfft(x) * ((frequencies >= band_hz[0]) & (frequencies < band_hz[1]))
    now = torch.fft.irfft(spectrum, len(x))
    one_period = torch.exp(2j * math.pi * frequencies / pitch_hz)
    later = torch.fft.irfft(spectrum * one_period, len(x))
    window = torch.hann_window(4 * HOP).sqrt()
    a, b = _frames(now, window, num_frames), _frames(later, window, num_frames)
    return (a * b).sum(1) / ((a * a).sum(1) * (b * b).sum(1)).sqrt().clamp(min=1e-7)


def _to_bins(log_power: torch.Tensor, formant_shift: float) -> torch.Tensor:
    """Interpolated between the centres of the mel bands; float32 [num_frames, _BINS]."""
    centres = (_FILTERS * torch.arange(_BINS)[:, None]).sum(0) / _FILTERS.sum(0)
    position = torch.arange(_BINS) / formant_shift
    upper = torch.searchsorted(centres, position).clamp(1, NUM_MELS - 1)
    part = ((position - centres[upper - 1]) / (centres[upper] - centres[upper - 1])).clamp(0, 1)
    return log_power[:, upper - 1] * (1 - part) + log_power[:, upper] * part


def _share_per_bin(voiced: torch.Tensor) -> torch.Tensor:
    """The voiced share of the power, float32 [num_frames, _BINS], smooth between the bands."""
    edges = [0, 1000, 2500, 5000, SAMPLE_RATE_HZ // 2 + 1]
    share = torch.zeros(len(voiced), _BINS)
    for band, (low, high) in enumerate(pairwise(edges)):
        share[:, low * _FFT // SAMPLE_RATE_HZ : high * _FFT // SAMPLE_RATE_HZ + 1] = voiced[
            :, band : band + 1
        ]
    padded = torch.nn.functional.pad(share[:, None], (10, 10), mode="replicate")
    return torch.nn.functional.avg_pool1d(padded, 21, 1)[:, 0]


def _pulses(
    amplitude: torch.Tensor, share: torch.Tensor, is_voiced: torch.Tensor, per_frame: int
) -> torch.Tensor:
    """A minimum-phase response at each pulse."""
    cepstrum = torch.fft.irfft(amplitude + share.clamp(min=1e-4).log() / 2, _FFT)
    folded = torch.zeros_like(cepstrum)
    folded[:, 0], folded[:, _FFT // 2] = cepstrum[:, 0], cepstrum[:, _FFT // 2]
    folded[:, 1 : _FFT // 2] = 2 * cepstrum[:, 1 : _FFT // 2]
    response = torch.fft.irfft(torch.exp(torch.fft.rfft(folded)), _FFT) * math.sqrt(HOP / per_frame)
    fade = torch.ones(_FFT)
    fade[700:] = torch.linspace(1, 0, _FFT - 700)
    response = response * fade * is_voiced[:, None]
    wave = torch.zeros((len(amplitude) + 1) * HOP + _FFT)
    for pulse in range(per_frame):
        # After a frame's first pulse, the voice interpolates towards the next frame.
        shape = response if pulse == 0 else (response + torch.cat([response[1:], response[-1:]])) / 2
        _overlap_add(wave, shape, HOP * (2 * pulse + 1) // (2 * per_frame) - 20)
    return wave[: len(amplitude) * HOP]


def _noise(amplitude: torch.Tensor, share: torch.Tensor, seed: int) -> torch.Tensor:
    num_frames = len(amplitude)
    white = torch.randn((num_frames + 1) * HOP, generator=torch.Generator().manual_seed(seed))
    segments = white.unfold(0, 2 * HOP, HOP)[:num_frames] * torch.hann_window(2 * HOP)
    shaped = torch.fft.irfft(torch.fft.rfft(segments, _FFT) * amplitude.exp() * (1 - share).sqrt(), _FFT)
    wave = torch.zeros((num_frames + 1) * HOP + _FFT)
    _overlap_add(wave, shaped[:, : 3 * HOP], 20)
    return wave[: num_frames * HOP]


def _overlap_add(wave: torch.Tensor, pieces: torch.Tensor, start: int) -> None:
    """Adds each of `pieces` [num_frames, width] one frame after the previous."""
    stride = -(-pieces.shape[1] // HOP)
    for offset in range(min(stride, len(pieces))):
        selected = torch.nn.functional.pad(
            pieces[offset::stride], (0, stride * HOP - pieces.shape[1])
        ).flatten()
        begin = start + offset * HOP
        end = min(begin + len(selected), len(wave))
        wave[begin:end] += selected[: end - begin]
