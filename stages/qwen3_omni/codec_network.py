"""The network of Qwen3-Omni's decoder."""

import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig

from stages.qwen_codec.code2wav.network import Code2WavNetwork
from stages.qwen_codec.code2wav.state import Step
from stages.qwen_codec.code2wav.transformer import Transformer


class Qwen3OmniNetwork(Code2WavNetwork):
    def __init__(self, config: Qwen3OmniMoeCode2WavConfig) -> None:
        width = config.hidden_size
        transformer = Transformer(config, head_dim=width // config.num_attention_heads)
        super().__init__(config, transformer, code_width=width, width=width, has_lead=True)

    def frames(self, embedded: torch.Tensor, step: Step) -> torch.Tensor:
        return embedded.mean(2)
