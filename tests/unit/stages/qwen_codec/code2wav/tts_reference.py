"""Qwen3-TTS' decoder of the same random layers as Qwen3-Omni's, one pass over all frames; transformers has
none."""

import torch
from torch import nn
from torch.nn import functional as F

from stages.qwen3_tts.codec_layout import PRE_CONV_KERNEL
from stages.qwen3_tts.hf_config import Qwen3TTSDecoderConfig
from tests.reference.qwen3_code2wav import random_code2wav, small_config


def small_tts_config() -> Qwen3TTSDecoderConfig:
    """Heads that are together wider than the transformer."""
    fields = small_config().to_dict() | {
        "hidden_size": 24,
        "latent_dim": 32,
        "codebook_dim": 16,
        "head_dim": 16,
    }
    return Qwen3TTSDecoderConfig(**fields)


class TTSReference(nn.Module):
    """Parameters have the names of `Qwen3TTSNetwork`."""

    def __init__(self, config: Qwen3TTSDecoderConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        latent = config.latent_dim
        convolutional = random_code2wav(small_config(hidden_size=latent))
        self.pre_transformer = random_code2wav(config).pre_transformer
        self.upsample, self.decoder = convolutional.upsample, convolutional.decoder
        for block in list(self.decoder)[1:-2]:
            block.block[1].left_pad = 0
        self.code_embedding = nn.Embedding(config.num_quantizers * config.codebook_size, config.codebook_dim)
        self.pre_conv = nn.ModuleDict({"conv": nn.Conv1d(config.codebook_dim, latent, PRE_CONV_KERNEL)})
        self.pre_transformer.input_proj = nn.Linear(latent, config.hidden_size)
        self.pre_transformer.output_proj = nn.Linear(config.hidden_size, latent)
        self.to(dtype)

    @property
    def device(self) -> torch.device:
        return self.code_embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.code_embedding.weight.dtype

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """codes: [1, codebooks, num_frames]; returns [1, 1, samples]."""
        tables = torch.arange(self.config.num_quantizers)[:, None] * self.config.codebook_size
        x = self.code_embedding(codes + tables).sum(1).transpose(1, 2)
        x = self.pre_conv["conv"](F.pad(x, (PRE_CONV_KERNEL - 1, 0))).transpose(1, 2)
        x = self.pre_transformer.input_proj(x)
        x = self.pre_transformer(inputs_embeds=x).last_hidden_state
        x = self.pre_transformer.output_proj(x).transpose(1, 2)
        for layers in self.upsample:
            for layer in layers:
                x = layer(x)
        for layer in self.decoder:
            x = layer(x)
        return x.clamp(-1, 1)


def quantizer_weights(config: Qwen3TTSDecoderConfig) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random weights of the residual vector quantizers, by name, and `TTSReference.code_embedding` for
    them."""
    weights, tables = {}, []
    inner = config.codebook_dim // 2
    for group, number in (("rvq_first", 1), ("rvq_rest", config.num_quantizers - 1)):
        out = torch.randn(config.codebook_dim, inner, 1) / inner**0.5
        weights[f"quantizer.{group}.output_proj.weight"] = out
        weights[f"quantizer.{group}.input_proj.weight"] = torch.randn(
            inner, config.codebook_dim, 1
        )  # encodes
        for layer in range(number):
            usage, sums = torch.rand(config.codebook_size), torch.randn(config.codebook_size, inner)
            usage[0], sums[0] = 0, 1e-5  # a code that training never used
            codebook = f"quantizer.{group}.vq.layers.{layer}._codebook"
            weights |= {f"{codebook}.cluster_usage": usage, f"{codebook}.embedding_sum": sums}
            vectors = sums / usage.clamp(min=1e-5)[:, None]
            tables.append(F.conv1d(vectors[..., None], out)[..., 0])
    return weights, torch.cat(tables)
