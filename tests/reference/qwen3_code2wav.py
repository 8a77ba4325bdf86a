"""Transformers' Qwen3-Omni code2wav with random weights whose output depends on every input and stays in
range."""

import math

import torch
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeCode2WavDecoderResidualUnit,
    Qwen3OmniMoeCode2WavLayerScale,
    Qwen3OmniMoeConvNeXtBlock,
    Qwen3OmniMoeSnakeBeta,
)

LEVEL = 0.2
"""Standard deviation of the audio of random codes."""


def small_config(**changes: object) -> Qwen3OmniMoeCode2WavConfig:
    """The published structure, rates and vocabulary, with few channels and a short window."""
    fields: dict[str, object] = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "sliding_window": 12,
        "decoder_dim": 32,
        "codebook_size": 2048,
        "num_quantizers": 16,
    }
    return Qwen3OmniMoeCode2WavConfig(**(fields | changes))


def random_code2wav(
    config: Qwen3OmniMoeCode2WavConfig, dtype: torch.dtype = torch.float32
) -> Qwen3OmniMoeCode2Wav:
    """Always the same weights for one config."""
    torch.manual_seed(0)
    with torch.no_grad():
        model = Qwen3OmniMoeCode2Wav(config).eval()
        for module in model.modules():
            _give_unit_gain(module)
        for module in model.modules():
            if isinstance(module, Qwen3OmniMoeCode2WavDecoderResidualUnit):
                module.conv2.conv.weight *= 0.5  # else rounding in float32 grows from unit to unit
        waveform = unclipped(model, torch.randint(config.codebook_size, (1, config.num_quantizers, 40)))
        last = model.decoder[-1].conv
        last.weight *= LEVEL / waveform.std()
        last.bias.zero_()
        return model.to(dtype)


def unclipped(model: Qwen3OmniMoeCode2Wav, codes: torch.Tensor) -> torch.Tensor:
    """The input of the last operation, which clips."""
    outputs: list[torch.Tensor] = []
    hook = model.decoder[-1].register_forward_hook(lambda *values: outputs.append(values[-1]))
    model(codes)
    hook.remove()
    return outputs[0]


def _give_unit_gain(module: nn.Module) -> None:
    """With transformers' initial weights (standard deviation 0.02) the output hardly depends on the input."""
    if isinstance(module, nn.ConvTranspose1d):
        nn.init.normal_(module.weight, std=1 / math.sqrt(2 * module.in_channels))
    elif isinstance(module, nn.Linear | nn.Conv1d):
        nn.init.normal_(module.weight, std=1 / math.sqrt(module.weight[0].numel()))
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight)
    elif isinstance(module, Qwen3OmniMoeCode2WavLayerScale):
        nn.init.uniform_(module.scale, 0.3, 0.7)
    elif isinstance(module, Qwen3OmniMoeConvNeXtBlock):
        nn.init.uniform_(module.gamma, 0.3, 0.7)
    elif isinstance(module, Qwen3OmniMoeSnakeBeta):
        nn.init.normal_(module.alpha, std=0.2)
        nn.init.normal_(module.beta, std=0.2)
    if isinstance(module, nn.Linear | nn.Conv1d | nn.ConvTranspose1d) and module.bias is not None:
        nn.init.normal_(module.bias, std=0.05)
