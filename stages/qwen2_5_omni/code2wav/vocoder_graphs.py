"""The vocoder as CUDA graphs of a few fixed shapes.

Crops of different lengths share a shape: beyond a margin, any continuation is as good as silence, so the crop
is padded there by repeating its edge frame. At an end of the speech, padding is not allowed, so that end of
the crop is aligned with that end of the shape.
"""

import bisect
import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavBigVGANModel

from stages.qwen2_5_omni.code2wav.bigvgan import FusedBigVGAN
from stages.qwen2_5_omni.code2wav.vocoder import MelCrop, Vocoder
from stages.qwen2_5_omni.code2wav.vocoder_batches import batch_plan, needed_sizes
from stages.runtime.cuda_graphs import CudaGraphRecorder, Work

LENGTH_STEP = 48
"""Mel frames between lengths. An extra one, 64, fits the crop of one block with both margins."""


class GraphedVocoder(Vocoder):
    """On CUDA; fused and in the given type."""

    def __init__(
        self,
        bigvgan: Qwen2_5OmniToken2WavBigVGANModel,
        dtype: torch.dtype,
        *,
        longest_crop: int,
        max_num_crops: int,
        device: torch.device,
    ) -> None:
        """Crops of more than `longest_crop` frames, and those that span the whole speech, run without a
        graph. At most `max_num_crops` crops are computed together."""
        self._samples_per_frame = math.prod(bigvgan.config.upsample_rates)
        self._vocoder = FusedBigVGAN(bigvgan, dtype)
        self._lengths = [48, 64, *range(96, longest_crop + LENGTH_STEP, LENGTH_STEP)]
        self._replay: dict[tuple[int, int], Work] = {}
        self._max_num_crops = max_num_crops
        mel_dim: int = bigvgan.config.mel_dim
        largest = max(length * needed_sizes(length, max_num_crops)[-1] for length in self._lengths)
        # Silence in input units: a graph may run before anything is written here.
        self._mel = torch.full((largest, mel_dim), -11.5, device=device)
        self._waveform = torch.zeros(largest * self._samples_per_frame, device=device)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record all graphs. Must be called before `synthesize`."""
        shapes = [
            (batch_size, length)
            for length in reversed(self._lengths)
            for batch_size in reversed(needed_sizes(length, self._max_num_crops))
        ]
        for shape in shapes:
            self._compute(*shape)  # compiles kernels
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # graphs use their own memory
        record = CudaGraphRecorder()
        self._replay = {shape: record(partial(self._compute, *shape)) for shape in shapes}

    @torch.inference_mode()
    def synthesize(self, crops: Sequence[MelCrop]) -> list[torch.Tensor]:
        waveforms: dict[int, torch.Tensor] = {}
        groups: dict[int, list[int]] = defaultdict(list)
        for index, crop in enumerate(crops):
            length = self._length_for(crop)
            if length is None:
                waveform = self._vocoder.synthesize(crop.mel[None])[0]
                waveforms[index] = crop.kept(waveform, self._samples_per_frame)
            else:
                groups[length].append(index)
        for length, members in groups.items():
            for start in range(0, len(members), self._max_num_crops):
                rest = members[start : start + self._max_num_crops]
                for batch_size in batch_plan(len(rest), length):
                    part, rest = rest[:batch_size], rest[batch_size:]
                    results = self._run(batch_size, length, [crops[index] for index in part])
                    waveforms.update(zip(part, results, strict=True))
        return [waveforms[index] for index in range(len(crops))]

    def _length_for(self, crop: MelCrop) -> int | None:
        length = len(crop.mel)
        if length in self._lengths:
            return length
        if (crop.is_first and crop.is_last) or length > self._lengths[-1]:
            return None
        return self._lengths[bisect.bisect(self._lengths, length)]

    def _run(self, batch_size: int, length: int, crops: Sequence[MelCrop]) -> list[torch.Tensor]:
        inputs, outputs = self._buffers(batch_size, length)
        starts = []
        for slot, crop in zip(inputs, crops, strict=False):
            mel, extra = crop.mel, length - len(crop.mel)
            start = extra if crop.is_last else 0
            starts.append(start)
            slot[start : start + len(mel)] = mel
            if start:
                slot[:start] = mel[0]
            elif extra:
                slot[len(mel) :] = mel[-1]
        self._replay[batch_size, length]()
        return [
            crop.kept(output[start * self._samples_per_frame :], self._samples_per_frame)
            for output, start, crop in zip(outputs, starts, crops, strict=False)
        ]

    def _buffers(self, batch_size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The front of the shared input [batch, length, mel_dim] and output [batch, num_samples]."""
        size = batch_size * length
        inputs = self._mel[:size].view(batch_size, length, -1)
        return inputs, self._waveform[: size * self._samples_per_frame].view(batch_size, -1)

    def _compute(self, batch_size: int, length: int) -> None:
        inputs, outputs = self._buffers(batch_size, length)
        outputs.copy_(self._vocoder.synthesize(inputs))
