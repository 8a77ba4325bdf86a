"""The network of Qwen3-TTS' decoder (`Qwen3TTSTokenizerV2Decoder` in qwen-tts)."""

import torch
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig

from stages.qwen3_tts.codec_layout import PRE_CONV_KERNEL
from stages.qwen3_tts.hf_config import Qwen3TTSDecoderConfig
from stages.qwen_codec.code2wav.network import CausalConv, Code2WavNetwork
from stages.qwen_codec.code2wav.state import Step
from stages.qwen_codec.code2wav.transformer import Transformer


class ProjectedTransformer(Transformer):
    def __init__(self, config: Qwen3TTSDecoderConfig) -> None:
        super().__init__(config, head_dim=config.head_dim)
        self.input_proj = nn.Linear(config.latent_dim, config.hidden_size)
        self.output_proj = nn.Linear(config.hidden_size, config.latent_dim)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x: [num_streams, new frames, latent_dim], and so is the result."""
        return self.output_proj(super().forward(self.input_proj(x), step))


class Qwen3TTSNetwork(Code2WavNetwork):
    """`code_embedding` has the vectors of all codebooks, as their quantizers project them."""

    has_lead = False

    def __init__(self, config: Qwen3TTSDecoderConfig) -> None:
        super().__init__(config)
        self.pre_conv = CausalConv(config.codebook_dim, config.latent_dim, kernel=PRE_CONV_KERNEL)

    def parts(self, config: Qwen3OmniMoeCode2WavConfig) -> tuple[int, int, Transformer]:
        assert isinstance(config, Qwen3TTSDecoderConfig)
        return config.codebook_dim, config.latent_dim, ProjectedTransformer(config)

    def frames(self, embedded: torch.Tensor, step: Step) -> torch.Tensor:
        return self.pre_conv(embedded.sum(2).transpose(1, 2), step).transpose(1, 2)
