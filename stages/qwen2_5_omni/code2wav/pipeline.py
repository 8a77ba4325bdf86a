"""Runs the DiT and then the vocoder, in the variant that the stage config selects."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniToken2WavBigVGANModel,
    Qwen2_5OmniToken2WavDiTModel,
)

from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from stages.qwen2_5_omni.code2wav.dit import PackedDiT
from stages.qwen2_5_omni.code2wav.dit_ops import TorchDiTOps
from stages.qwen2_5_omni.code2wav.packing import Carry, MelJob, max_num_blocks, num_blocks_of
from stages.qwen2_5_omni.code2wav.sampler import MelSampler
from stages.qwen2_5_omni.code2wav.streams import StreamTable
from stages.qwen2_5_omni.code2wav.vocoder import Vocoder, mel_crop
from stages.qwen2_5_omni.code2wav.voices import Voice
from stages.qwen2_5_omni.codec_window import CodecWindow
from stages.qwen2_5_omni.options import Code2WavStage


@dataclass(frozen=True)
class WindowJob:
    """A valid window and its inputs, on the CPU."""

    window: CodecWindow
    codes: torch.Tensor
    """int64 [num_codes]."""
    noise: torch.Tensor
    """float32 [num_codes * frames per code, mel_dim]."""
    voice: int
    """Index in the pipeline's list of voices."""


class Code2WavPipeline:
    """Uses fused kernels and CUDA graphs with `is_fast` (CUDA only), otherwise PyTorch's operators and
    transformers' vocoder, eagerly."""

    @torch.inference_mode()
    def __init__(
        self,
        dit: Qwen2_5OmniToken2WavDiTModel,
        bigvgan: Qwen2_5OmniToken2WavBigVGANModel,
        voices: Sequence[Voice],
        runtime: DiffusionRuntimeConfig,
    ) -> None:
        """Frees the weights of `dit`, and those of `bigvgan` unless it runs unchanged. Compiles all kernels
        and records all CUDA graphs."""
        self._frames_per_code: int = dit.config.repeats
        codes_per_block = dit.config.block_size // dit.config.repeats
        device = dit.proj_out.weight.device
        dtype: torch.dtype = getattr(torch, runtime.compute_dtype)
        stage = runtime.stage
        assert isinstance(stage, Code2WavStage)
        longest_window_frames = num_blocks_of(stage.max_model_len, codes_per_block) * dit.config.block_size
        ops = TorchDiTOps()
        self._vocoder = Vocoder(bigvgan)
        if runtime.is_fast:
            # Triton exists on CUDA only.
            from stages.qwen2_5_omni.code2wav.dit_kernels import TritonDiTOps
            from stages.qwen2_5_omni.code2wav.vocoder_graphs import GraphedVocoder

            ops = TritonDiTOps()
            self._vocoder = graphed = GraphedVocoder(
                bigvgan,
                dtype,
                longest_crop=longest_window_frames,
                max_num_crops=stage.max_num_seqs,
                device=device,
            )
            bigvgan.to("meta")
        self.streams = StreamTable(
            runtime.num_streams, codes_per_block=codes_per_block, frames_per_code=self._frames_per_code
        )
        self._sampler = MelSampler(
            PackedDiT(
                dit,
                stage.solver,
                voices,
                ops,
                dtype=dtype,
                longest_window_frames=longest_window_frames,
                num_streams=runtime.num_streams,
            ),
            codes_per_block=codes_per_block,
            max_num_blocks=max_num_blocks(stage, codes_per_block),
            device=device,
            use_graphs=runtime.is_fast,
        )
        if runtime.is_fast:
            graphed.capture()

    @torch.inference_mode()
    def run(self, jobs: Sequence[WindowJob]) -> list[torch.Tensor]:
        """Returns each window's emitted waveform, float32 [num_codes * samples per code] in [-1, 1].

        A window that continues its stream is computed without the codes before `emit_start`. No two windows
        are of one stream."""
        windows = [job.window for job in jobs]
        carries = self.streams.enter(windows)
        try:
            mel_jobs = [self._mel_job(job, carry) for job, carry in zip(jobs, carries, strict=True)]
            mels = self._sampler.sample(mel_jobs)
            # From here on, a window that continues its stream starts at the vocoder's margin.
            extended = [self._with_margin(*parts) for parts in zip(windows, carries, mels, strict=True)]
            waveforms = self._vocoder.synthesize(
                [mel_crop(window, mel, self._frames_per_code) for window, mel in extended]
            )
            tails = [
                self._tail(window, mel, carry) for (window, mel), carry in zip(extended, carries, strict=True)
            ]
        except BaseException:
            self.streams.abandon(carries)
            raise
        self.streams.leave(windows, carries, tails)
        return waveforms

    def _mel_job(self, job: WindowJob, carry: Carry | None) -> MelJob:
        is_read = carry is not None and carry.is_read
        skipped = job.window.emit_start - job.window.first_code if is_read else 0
        return MelJob(job.codes[skipped:], job.noise[skipped * self._frames_per_code :], job.voice, carry)

    def _with_margin(
        self, window: CodecWindow, carry: Carry | None, mel: torch.Tensor
    ) -> tuple[CodecWindow, torch.Tensor]:
        """Prepends the mel frames that the stream kept to the window's own `[num_frames, mel_dim]`."""
        if carry is None or carry.mel is None:
            return window, mel
        first_code = window.emit_start - len(carry.mel) // self._frames_per_code
        return msgspec.structs.replace(window, first_code=first_code), torch.cat([carry.mel, mel])

    def _tail(self, window: CodecWindow, mel: torch.Tensor, carry: Carry | None) -> torch.Tensor | None:
        """Mel frames that the vocoder needs in the next window, if they are kept."""
        if carry is None or carry.kept_block is None:
            return None
        end = (window.emit_end - window.first_code) * self._frames_per_code
        num_frames = self.streams.num_margin_codes(window, window.emit_end) * self._frames_per_code
        # Copied, because the mel is a view of the whole batch's.
        return mel[max(0, end - num_frames) : end].clone()
