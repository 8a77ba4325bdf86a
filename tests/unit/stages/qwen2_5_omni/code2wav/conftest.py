"""A small random token2wav of transformers, the reference of these tests."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import (
    Qwen2_5OmniBigVGANConfig,
    Qwen2_5OmniDiTConfig,
    Qwen2_5OmniToken2WavConfig,
)
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from stages.qwen2_5_omni.code2wav.voices import Voice

torch.set_num_threads(1)

MEL_LEVEL = -4.5
"""Middle of the range that the vocoder does not clip (-10.9 to 2.3)."""


@pytest.fixture(scope="session")
def token2wav() -> Qwen2_5OmniToken2WavModel:
    """Four DiT layers with the genuine model's pattern: two look back one block, one looks ahead."""
    dit = Qwen2_5OmniDiTConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        head_dim=32,
        emb_dim=32,
        num_embeds=199,
        enc_emb_dim=24,
        enc_dim=16,
        enc_channels=[16, 16, 16, 16, 48],
        enc_attention_channels=8,
        enc_se_channels=8,
        look_ahead_layers=[2],
        look_backward_layers=[0, 3],
    )
    bigvgan = Qwen2_5OmniBigVGANConfig(
        upsample_initial_channel=64, resblock_kernel_sizes=[3, 7], resblock_dilation_sizes=[[1, 3, 5], [1, 3, 5]]
    )
    torch.manual_seed(0)
    model = Qwen2_5OmniToken2WavModel(Qwen2_5OmniToken2WavConfig(dit_config=dit, bigvgan_config=bigvgan)).eval()
    with torch.no_grad():
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
    model.code2wav_bigvgan_model(MEL_LEVEL + torch.randn(1, 80, 100))
    hook.remove()
    last.weight *= 0.1 / levels[0]


@pytest.fixture(scope="session")
def voices() -> tuple[Voice, Voice]:
    generator = torch.Generator().manual_seed(1)

    def voice(name: str) -> Voice:
        return Voice(
            name=name,
            bos_token=0,
            conditioning=torch.randn(1, 24, generator=generator),
            reference_mel=MEL_LEVEL + 1.5 * torch.randn(1, 60, 80, generator=generator),
        )

    return voice("Ethan"), voice("Chelsie")


@pytest.fixture
def random_codes() -> Callable[[int, int], torch.Tensor]:
    """(number, seed) to int64 [number]."""

    def draw(number: int, seed: int) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng(seed).integers(0, 200, number))

    return draw


@pytest.fixture
def inject_noise(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.Tensor], None]:
    """Make transformers' sampler start from the given noise [1, num_frames, mel_dim] instead of a random draw."""

    def inject(noise: torch.Tensor) -> None:
        def draw(size: list[int], **_: object) -> torch.Tensor:
            assert list(noise.shape) == list(size)
            return noise.clone()

        monkeypatch.setattr(torch, "randn", draw)

    return inject
