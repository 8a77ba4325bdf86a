"""Transformers' token2wav with random weights whose output depends on every input and stays in range."""

import math

import torch
from torch import nn
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from stages.qwen2_5_omni.options import Code2WavStage

MEL_LEVEL = -4.5
"""Middle of the range that the vocoder does not clip (-10.9 to 2.3)."""


def random_token2wav(config: Qwen2_5OmniToken2WavConfig, device: str = "cpu") -> Qwen2_5OmniToken2WavModel:
    """Float32, always the same weights on one device."""
    torch.manual_seed(0)
    config._attn_implementation = "sdpa"
    with torch.device(device), torch.no_grad():
        model = Qwen2_5OmniToken2WavModel(config).eval().float()
        _give_unit_gain(model)
        model.code2wav_dit_model.proj_out.bias += MEL_LEVEL
        _calibrate_level(model)
    return model


def _give_unit_gain(model: nn.Module) -> None:
    """With transformers' initial weights (standard deviation 0.02) the output hardly depends on the input."""
    for module in model.modules():
        if isinstance(module, nn.ConvTranspose1d):
            nn.init.normal_(module.weight, std=1 / math.sqrt(2 * module.in_channels))
        elif isinstance(module, nn.Linear | nn.Conv1d):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.weight[0].numel()))
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
        if isinstance(module, nn.Linear | nn.Conv1d | nn.ConvTranspose1d) and module.bias is not None:
            nn.init.normal_(module.bias, std=0.05)


def _calibrate_level(model: Qwen2_5OmniToken2WavModel) -> None:
    """Random weights would drive the waveform into the clamp at -1 and 1."""
    last = model.code2wav_bigvgan_model.conv_post
    last.weight -= last.weight.mean(-1, keepdim=True)
    levels = []
    hook = last.register_forward_hook(lambda _m, _i, wave: levels.append(wave.square().mean().sqrt()))
    model.code2wav_bigvgan_model(MEL_LEVEL + torch.randn(1, 80, 100, device=last.weight.device))
    hook.remove()
    last.weight *= 0.1 / levels[0]


def code2wav_stage(**fields: object) -> Code2WavStage:
    """The decoder in a stage config, with windows of at most 2048 codec tokens."""
    return Code2WavStage.model_validate(
        {"engine": "diffusion", "model_stage": "code2wav", "max_model_len": 2048, **fields}
    )
