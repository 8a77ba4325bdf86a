"""DiT and vocoder one after the other, in the form that the stage's config asks for."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniToken2WavBigVGANModel,
    Qwen2_5OmniToken2WavDiTModel,
)

from omni_server.protocol.codec_window import CodecWindow
from omni_server.protocol.diffusion_config import ComputeDtype, DiffusionRuntimeConfig
from stages.qwen2_5_omni.code2wav.dit import PackedDiT
from stages.qwen2_5_omni.code2wav.dit_ops import DiTOps, TorchDiTOps
from stages.qwen2_5_omni.code2wav.sampler import MelJob, MelSampler
from stages.qwen2_5_omni.code2wav.vocoder import PlainVocoder, Vocoder, mel_crop
from stages.qwen2_5_omni.code2wav.voices import Voice

TORCH_DTYPES: dict[ComputeDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class WindowJob:
    """A valid window and what it needs, on the CPU."""

    window: CodecWindow
    codes: torch.Tensor
    """int64 [num_codes]."""
    noise: torch.Tensor
    """float32 [num_codes * frames per code, mel_dim]."""
    voice: int
    """Index in the voices that the pipeline was given."""


class Code2WavPipeline:
    """With `is_fast` (CUDA only): fused kernels and CUDA graphs. Otherwise PyTorch's own operators and transformers'
    vocoder, eagerly."""

    def __init__(
        self,
        dit: Qwen2_5OmniToken2WavDiTModel,
        bigvgan: Qwen2_5OmniToken2WavBigVGANModel,
        voices: Sequence[Voice],
        runtime: DiffusionRuntimeConfig,
    ) -> None:
        """It keeps `bigvgan` where it is run as it is; of `dit` it keeps nothing."""
        self._frames_per_code: int = dit.config.repeats
        codes_per_block = dit.config.block_size // dit.config.repeats
        device = dit.proj_out.weight.device
        dtype = TORCH_DTYPES[runtime.compute_dtype]
        longest_window_frames = -(-runtime.longest_window // codes_per_block) * dit.config.block_size
        ops: DiTOps
        self._vocoder: Vocoder
        if runtime.is_fast:
            # Triton is there on CUDA only.
            from stages.qwen2_5_omni.code2wav.dit_kernels import TritonDiTOps
            from stages.qwen2_5_omni.code2wav.vocoder_graphs import GraphedVocoder

            ops = TritonDiTOps()
            self._vocoder = GraphedVocoder(bigvgan, dtype, longest_crop=longest_window_frames, device=device)
        else:
            ops = TorchDiTOps()
            self._vocoder = PlainVocoder(bigvgan)
        self._sampler = MelSampler(
            PackedDiT(dit, runtime.solver, voices, ops, dtype=dtype, longest_window_frames=longest_window_frames),
            codes_per_block=codes_per_block,
            max_num_blocks=runtime.max_num_blocks(codes_per_block),
            device=device,
            use_graphs=runtime.is_fast,
        )

    def warm_up(self) -> None:
        """Compile kernels and record CUDA graphs now instead of at their first use."""
        self._sampler.capture()
        self._vocoder.capture()

    @torch.inference_mode()
    def run(self, jobs: Sequence[WindowJob]) -> list[torch.Tensor]:
        """Per window the waveform of the codes it emits, float32 [num_codes * samples per code] in [-1, 1]."""
        mels = self._sampler.sample([MelJob(job.codes, job.noise, job.voice) for job in jobs])
        crops = [mel_crop(job.window, len(job.codes), self._frames_per_code) for job in jobs]
        return self._vocoder.synthesize(mels, crops)
