"""A small random token2wav of transformers, the reference of these tests."""

from collections.abc import Callable
from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import (
    Qwen2_5OmniBigVGANConfig,
    Qwen2_5OmniDiTConfig,
    Qwen2_5OmniToken2WavConfig,
)
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from stages.qwen2_5_omni.code2wav.dit import PackedDiT
from stages.qwen2_5_omni.code2wav.dit_ops import TorchDiTOps
from stages.qwen2_5_omni.code2wav.sampler import MelSampler
from stages.qwen2_5_omni.code2wav.voices import Voice
from stages.qwen2_5_omni.options import SolverConfig
from tests.reference.token2wav import MEL_LEVEL, random_token2wav

torch.set_num_threads(1)


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
        upsample_initial_channel=64,
        resblock_kernel_sizes=[3, 7],
        resblock_dilation_sizes=[[1, 3, 5], [1, 3, 5]],
    )
    return random_token2wav(Qwen2_5OmniToken2WavConfig(dit_config=dit, bigvgan_config=bigvgan))


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


REFERENCE_SOLVER = SolverConfig(num_steps=10)

MakeSampler = Callable[..., MelSampler]


@pytest.fixture
def make_sampler(token2wav: Qwen2_5OmniToken2WavModel, voices: tuple[Voice, Voice]) -> MakeSampler:
    """To a sampler on the CPU."""

    def make(solver: SolverConfig = REFERENCE_SOLVER) -> MelSampler:
        with torch.no_grad():
            dit = PackedDiT(
                deepcopy(token2wav.code2wav_dit_model),
                solver,
                voices,
                TorchDiTOps(),
                dtype=torch.float32,
                longest_window_frames=1200,
                num_streams=0,
            )
        return MelSampler(
            dit,
            codes_per_block=12,
            max_num_blocks=64,
            device=torch.device("cpu"),
            use_graphs=False,
        )

    return make


@pytest.fixture(scope="session")
def random_codes() -> Callable[[int, int], torch.Tensor]:
    """(number, seed) to int64 [number]."""

    def draw(number: int, seed: int) -> torch.Tensor:
        return torch.from_numpy(np.random.default_rng(seed).integers(0, 200, number))

    return draw


@pytest.fixture
def inject_noise(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.Tensor], None]:
    """Make transformers' sampler start from the given noise [1, num_frames, mel_dim] instead of a random
    draw."""

    def inject(noise: torch.Tensor) -> None:
        def draw(size: list[int], **_: object) -> torch.Tensor:
            assert list(noise.shape) == list(size)
            return noise.clone()

        monkeypatch.setattr(torch, "randn", draw)

    return inject
