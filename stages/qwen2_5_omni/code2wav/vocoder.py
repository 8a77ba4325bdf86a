"""Mel spectrogram to waveform: runs the vocoder on the emitted part of a window, plus a margin.

An output sample of BigVGAN, a convolutional network, depends on about 28 mel frames to each side. Beyond its
input it assumes silence, which is correct only at the ends of the speech; elsewhere the margin keeps that
error out of the emitted part.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavBigVGANModel

from stages.qwen2_5_omni.codec_window import CodecWindow


@dataclass(frozen=True)
class MelCrop:
    """The mel frames of a window that the vocoder gets, and which of them are emitted."""

    mel: torch.Tensor
    """float32 [num_frames, mel_dim]."""
    skip: int
    """Frames at the start that are context."""
    keep: int
    """Frames after them that become audio."""
    is_first: bool
    """The crop starts where the speech starts: silence precedes it."""
    is_last: bool
    """The crop ends where the speech ends."""

    def kept(self, waveform: torch.Tensor, samples_per_frame: int) -> torch.Tensor:
        """The emitted part of the crop's waveform."""
        start = self.skip * samples_per_frame
        return waveform[start : start + self.keep * samples_per_frame].clone()


def mel_crop(window: CodecWindow, mel: torch.Tensor, frames_per_code: int) -> MelCrop:
    """The crop of a valid window's spectrogram, [num_codes * frames_per_code, mel_dim]."""
    emit_start = (window.emit_start - window.first_code) * frames_per_code
    emit_end = (window.emit_end - window.first_code) * frames_per_code
    start = max(0, emit_start - window.vocoder_margin_frames)
    return MelCrop(
        mel[start : emit_end + window.vocoder_margin_frames],
        skip=emit_start - start,
        keep=emit_end - emit_start,
        is_first=start == 0 and window.first_code == 0,
        is_last=window.is_last,
    )


class Vocoder:
    """Transformers' module, unchanged, in float32; batches crops of equal length."""

    def __init__(self, bigvgan: Qwen2_5OmniToken2WavBigVGANModel) -> None:
        self._bigvgan = bigvgan
        self._samples_per_frame = math.prod(bigvgan.config.upsample_rates)

    def synthesize(self, crops: Sequence[MelCrop]) -> list[torch.Tensor]:
        """Waveforms, float32 [keep * samples per frame] in [-1, 1] on the device, one per crop."""
        groups: dict[int, list[int]] = defaultdict(list)
        for index, crop in enumerate(crops):
            groups[len(crop.mel)].append(index)
        waveforms: dict[int, torch.Tensor] = {}
        for members in groups.values():
            inputs = torch.stack([crops[index].mel.T for index in members])
            # The reference squeezes its output, so a batch of one comes back without the batch dimension.
            outputs = self._bigvgan(inputs).reshape(len(members), -1)
            for index, output in zip(members, outputs, strict=True):
                waveforms[index] = crops[index].kept(output, self._samples_per_frame)
        return [waveforms[index] for index in range(len(crops))]
