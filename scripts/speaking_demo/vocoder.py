"""The vocoder: mel frames in, waveform out. BigVGAN as small as its layout allows, trained by regression.

It needs no discriminator, because the voice is a local function of its mel frames (`voice.py`).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniBigVGANConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavBigVGANModel

from scripts.speaking_demo.voice import HOP

_SPECTRA = ((256, 64), (512, 128), (1024, 256))
"""(Window, hop) of each."""
_PHASE_WINDOW = 512
_EDGE = 2
"""Mel frames at both ends of a training clip that the loss ignores: the model sees padding there."""


@dataclass(frozen=True)
class Clips:
    mel: torch.Tensor
    """Float32 [batch, num_frames, NUM_MELS]."""
    wave: torch.Tensor
    """Float32 [batch, num_frames * HOP]."""
    is_voiced: torch.Tensor
    """1 or 0 per frame; float32 [batch, num_frames]."""


def build(config: Qwen2_5OmniBigVGANConfig) -> Qwen2_5OmniToken2WavBigVGANModel:
    model = Qwen2_5OmniToken2WavBigVGANModel(config)
    for module in model.modules():
        if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
            module.reset_parameters()
    return model


def waveform(model: Qwen2_5OmniToken2WavBigVGANModel, mel: torch.Tensor) -> torch.Tensor:
    """The model's forward without its final clamp and copy: `mel` [batch, num_frames, NUM_MELS] -> [batch,
    samples]."""
    hidden = model.conv_pre(model.process_mel_spectrogram(mel.transpose(1, 2)))
    count = model.num_residual_blocks
    for i in range(model.num_upsample_layers):
        hidden = model.ups[i][0](hidden)
        hidden = sum(model.resblocks[i * count + j](hidden) for j in range(count)) / count
    return model.conv_post(model.activation_post(hidden))[:, 0]


def loss(model: Qwen2_5OmniToken2WavBigVGANModel, clips: Clips) -> torch.Tensor:
    """Distance of the spectra at three resolutions, and of the phases where there are pulses."""
    made = waveform(model, clips.mel)[:, _EDGE * HOP : -_EDGE * HOP]
    target = clips.wave[:, _EDGE * HOP : -_EDGE * HOP]
    voiced = clips.is_voiced[:, _EDGE:-_EDGE]
    total = torch.zeros((), device=made.device)
    for window, hop in _SPECTRA:
        y, t = _spectrum(made, window, hop), _spectrum(target, window, hop)
        a, b = (y.abs().square() + 1e-8).sqrt(), (t.abs().square() + 1e-8).sqrt()
        logs = (a.clamp(min=2e-4).log() - b.clamp(min=2e-4).log()).abs().mean()
        total = total + (logs + 4 * (a.pow(0.4) - b.pow(0.4)).abs().mean()) / len(_SPECTRA)
        if window == _PHASE_WINDOW:
            weight = F.adaptive_avg_pool1d(voiced[:, None], a.shape[2])
            low = a.shape[1] // 2
            apart = (y * a.pow(-0.6) - t * b.pow(-0.6)).abs()
            total = total + 8 * (apart[:, :low] * weight).mean()
    return total


def _spectrum(wave: torch.Tensor, window: int, hop: int) -> torch.Tensor:
    shape = torch.hann_window(window, device=wave.device)
    return torch.stft(wave, window, hop, window=shape, return_complex=True, center=False) / math.sqrt(window)
