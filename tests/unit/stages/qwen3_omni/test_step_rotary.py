"""Cosines and sines of a step's packed positions. What layers make of them is compared with the reference in
tests/integration: test_frames.py and test_qwen3_parity.py."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

from omni_server.errors import ConfigError
from stages.qwen3_omni.step_rotary import StepRotaryEmbedding

DIM, SECTIONS, BASE = 64, [12, 10, 10], 1e6


@pytest.fixture(autouse=True)
def vllm_config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


def rope(dtype: torch.dtype, **scaling: Any) -> MRotaryEmbedding:
    return MRotaryEmbedding(DIM, DIM, 128, BASE, True, dtype, SECTIONS, **scaling)


def test_the_rows_of_a_step_are_always_in_one_place() -> None:
    """Where a CUDA graph looks for them."""
    rotary = StepRotaryEmbedding(rope(torch.float32), max_num_tokens=4)
    short, long = (rotary.begin_step(torch.zeros(3, count, dtype=torch.long)) for count in (1, 4))
    assert short.data_ptr() == long.data_ptr()


def test_scaled_frequencies_are_refused() -> None:
    with pytest.raises(ConfigError, match="scaled frequencies are not supported"):
        StepRotaryEmbedding(rope(torch.float32, scaling_factor=2.0), max_num_tokens=4)
