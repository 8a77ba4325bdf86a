"""Cosines and sines of a step's packed positions, and what the layers do with them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTextConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeThinkerTextRotaryEmbedding,
    apply_rotary_pos_emb,
)
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

from omni_server.errors import ConfigError
from stages.qwen3_omni.step_rotary import StepRotaryEmbedding
from stages.runtime.fractional_positions import packed

DIM, SECTIONS, BASE = 64, [12, 10, 10], 1e6
NUM_HEADS, NUM_KV_HEADS = 4, 2


@pytest.fixture(autouse=True)
def vllm_config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


def rope(dtype: torch.dtype, **scaling: Any) -> MRotaryEmbedding:
    return MRotaryEmbedding(DIM, DIM, 128, BASE, True, dtype, SECTIONS, **scaling)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_queries_and_keys_are_turned_as_in_the_reference(dtype: torch.dtype, num_tokens: int) -> None:
    """At positions between whole numbers, and with a step before that had more tokens."""
    generator = torch.Generator().manual_seed(3)
    positions = torch.rand(3, num_tokens, generator=generator) * 3000
    config = Qwen3OmniMoeTextConfig(
        head_dim=DIM,
        rope_parameters={"rope_type": "default", "rope_theta": BASE, "mrope_section": SECTIONS},
    )
    query, key = (
        torch.randn(num_tokens, heads * DIM, generator=generator).to(dtype)
        for heads in (NUM_HEADS, NUM_KV_HEADS)
    )
    cosines, sines = Qwen3OmniMoeThinkerTextRotaryEmbedding(config)(query, positions[:, None])
    expected = apply_rotary_pos_emb(
        *(states.view(1, num_tokens, -1, DIM).transpose(1, 2) for states in (query, key)), cosines, sines
    )

    rotary = StepRotaryEmbedding(rope(dtype), max_num_tokens=9)
    rotary.begin_step(packed(positions[:, :1].expand(3, 9).contiguous()))
    rows = rotary.begin_step(packed(positions))
    half = DIM // 2
    assert torch.equal(rotary.cos_sin_cache[rows, :half], cosines[0, :, :half])
    assert torch.equal(rotary.cos_sin_cache[rows, half:], sines[0, :, :half])
    for turned, wanted in zip(rotary(rows, query, key), expected, strict=True):
        wanted = wanted.transpose(1, 2).reshape(num_tokens, -1)
        torch.testing.assert_close(turned, wanted, rtol=0, atol=1e-6 if dtype == torch.float32 else 0.04)


def test_the_rows_of_a_step_are_always_in_one_place() -> None:
    """Where a CUDA graph looks for them."""
    rotary = StepRotaryEmbedding(rope(torch.float32), max_num_tokens=4)
    short, long = (rotary.begin_step(torch.zeros(3, count, dtype=torch.long)) for count in (1, 4))
    assert short.data_ptr() == long.data_ptr()


def test_scaled_frequencies_are_refused() -> None:
    with pytest.raises(ConfigError, match="scaled frequencies are not supported"):
        StepRotaryEmbedding(rope(torch.float32, scaling_factor=2.0), max_num_tokens=4)
