"""The code2wav stage as vLLM loads it: DiT, vocoder and voices of one Qwen2.5-Omni checkpoint."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniToken2WavBigVGANModel,
    Qwen2_5OmniToken2WavDiTModel,
)
from vllm.config import VllmConfig

from omni_server.config.stage_config import SolverConfig
from omni_server.errors import ConfigError
from omni_server.protocol.codec_window import CodecWindow, decode_codec_window
from stages.qwen2_5_omni.code2wav.dit import DiTSampler
from stages.qwen2_5_omni.code2wav.noise import noise_frames
from stages.qwen2_5_omni.code2wav.vocoder import Vocoder, mel_crop
from stages.qwen2_5_omni.code2wav.voices import VOICES_FILE, Voice, load_voices
from stages.runtime.diffusion_model import DiffusionBatch, RejectedRequestsError

WEIGHT_PREFIX = "token2wav."


@dataclass(frozen=True)
class _Job:
    """A valid request of a batch, at `index` of it."""

    index: int
    window: CodecWindow
    voice: Voice
    codes: torch.Tensor


class Qwen2_5OmniCode2Wav(torch.nn.Module):
    """Runs in float32 whatever the checkpoint's type, as the reference does: 36 evaluations of the DiT add up what
    a shorter type rounds off.

    `vllm_config.additional_config["omni"]["solver"]` is a `SolverConfig` as a dict.
    """

    # What vLLM's registry asks of a model of the pooling runner that has no attention of vLLM's.
    is_pooling_model: ClassVar[Literal[True]] = True
    is_attention_free: ClassVar[Literal[True]] = True
    attn_type: ClassVar[str] = "attention_free"

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        # The attribute names are those of the checkpoint. SDPA is the reference's choice too.
        self.code2wav_dit_model = Qwen2_5OmniToken2WavDiTModel._from_config(
            config.dit_config, attn_implementation="sdpa", dtype=torch.float32
        )
        self.code2wav_bigvgan_model = Qwen2_5OmniToken2WavBigVGANModel._from_config(
            config.bigvgan_config, attn_implementation="sdpa", dtype=torch.float32
        )
        self.eval()  # the DiT has dropout
        self._frames_per_code: int = config.dit_config.repeats
        self._codes_per_block: int = config.dit_config.block_size // config.dit_config.repeats
        self._mel_dim: int = config.dit_config.mel_dim
        self._table_size: int = self.code2wav_dit_model.text_embed.codec_embed.num_embeddings
        solver = SolverConfig.model_validate(vllm_config.additional_config.get("omni", {}).get("solver", {}))
        self._sampler = DiTSampler(self.code2wav_dit_model, solver)
        self._vocoder = Vocoder(self.code2wav_bigvgan_model)
        self._voices = load_voices(Path(vllm_config.model_config.model))
        for voice in self._voices.values():
            widths = (voice.conditioning.shape[-1], voice.reference_mel.shape[-1])
            if widths != (config.dit_config.enc_emb_dim, config.dit_config.mel_dim):
                raise ConfigError(
                    f"{VOICES_FILE}: voice '{voice.name}' has widths {widths}, the model's are "
                    f"{(config.dit_config.enc_emb_dim, config.dit_config.mel_dim)}"
                )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The codec embedding, [num_tokens, emb_dim]."""
        embedding: torch.Tensor = self.code2wav_dit_model.text_embed.codec_embed(input_ids)
        return embedding

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Not how this model is run. vLLM's registry recognises a model by these two parameters."""
        raise RuntimeError("code2wav runs through sample(batch) on the diffusion model runner")

    def sample(self, batch: DiffusionBatch) -> list[torch.Tensor]:
        """Waveforms of the codes that each window emits, float32 [num_codes * samples per code] on the CPU.

        `batch.inputs` are encoded `CodecWindow`s. Windows of equal length run together; none is padded, so that a
        result does not depend on its company. Raises `RejectedRequestsError` for invalid requests.
        """
        waveforms: dict[int, torch.Tensor] = {}
        groups: dict[int, list[_Job]] = defaultdict(list)
        for job in self._validated(batch):
            groups[len(job.codes)].append(job)
        for num_codes, jobs in groups.items():
            mels = self._sampler.sample(
                [job.voice for job in jobs],
                torch.stack([job.codes for job in jobs]),
                torch.stack([self._noise(job) for job in jobs]),
            )
            crops = [mel_crop(job.window, num_codes, self._frames_per_code) for job in jobs]
            for job, waveform in zip(jobs, self._vocoder.synthesize(list(mels), crops), strict=True):
                waveforms[job.index] = waveform
        return [waveforms[index] for index in range(len(batch.request_ids))]

    def _validated(self, batch: DiffusionBatch) -> list[_Job]:
        jobs: list[_Job] = []
        reasons: dict[str, str] = {}
        for index, (request_id, codes) in enumerate(zip(batch.request_ids, batch.token_ids, strict=True)):
            try:
                window = decode_codec_window(batch.inputs[index])
                window.validate(
                    len(codes), codes_per_block=self._codes_per_block, frames_per_code=self._frames_per_code
                )
                jobs.append(_Job(index, window, self._voice(window.voice), self._in_table(codes)))
            except ValueError as error:
                reasons[request_id] = str(error)
        if reasons:
            raise RejectedRequestsError(reasons)
        return jobs

    def _voice(self, name: str) -> Voice:
        if name not in self._voices:
            raise ValueError(f"there is no voice '{name}'; voices are {', '.join(self._voices)}")
        return self._voices[name]

    def _in_table(self, codes: torch.Tensor) -> torch.Tensor:
        lowest, highest = int(codes.min()), int(codes.max())
        if lowest < 0 or highest >= self._table_size:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"codec token {wrong} is outside the table of {self._table_size} codes")
        return codes

    def _noise(self, job: _Job) -> torch.Tensor:
        frames = self._frames_per_code
        noise = noise_frames(
            job.window.noise_seed, job.window.first_code * frames, len(job.codes) * frames, self._mel_dim
        )
        return torch.from_numpy(noise).to(job.codes.device)

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """vLLM's loader skips files that hold only weights of other stages."""
        return not name.startswith(WEIGHT_PREFIX)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy the checkpoint's `token2wav.` weights. Raises `ConfigError` if one is missing, unknown or misshapen."""
        own = dict(self.named_parameters()) | dict(self.named_buffers())
        missing = set(self.state_dict())
        for name, weight in weights:
            if self.is_unused_checkpoint_weight(name):
                continue
            key = name.removeprefix(WEIGHT_PREFIX)
            if key not in missing:
                raise ConfigError(f"the checkpoint's weight {name} has no place in the model")
            if own[key].shape != weight.shape:
                raise ConfigError(
                    f"the checkpoint's weight {name} is {list(weight.shape)}, the config says {list(own[key].shape)}"
                )
            own[key].data.copy_(weight)
            missing.discard(key)
        if missing:
            names = ", ".join(WEIGHT_PREFIX + key for key in sorted(missing)[:5])
            raise ConfigError(f"the checkpoint lacks {len(missing)} weights of the model, among them {names}")
        return set(self.state_dict())
