"""The warm-up of the kernels of mixtures of experts, over vLLM's own tables of kernels."""

import json
from pathlib import Path

import pytest
from vllm.model_executor.layers import fused_moe

from stages.runtime.stage_worker import expert_warm_up_sizes

MAX_NUM_BATCHED_TOKENS = 8192
GRAPH_TOKENS = 512
"""The warm-up of CUDA graphs compiles the kernels of steps up to this size."""


@pytest.fixture(params=("E=128,N=768,device_name=NVIDIA_H200", "E=128,N=384,device_name=NVIDIA_H200"))
def table(request: pytest.FixtureRequest) -> dict[int, object]:
    """A kernel's settings by the number of tokens for which they were tuned: of the thinker and the talker of
    Qwen3-Omni."""
    file = Path(fused_moe.__file__).parent / "configs" / f"{request.param}.json"
    return {int(key): value for key, value in json.loads(file.read_text()).items() if key.isdigit()}


def kernel(table: dict[int, object], num_tokens: int) -> tuple[int, bool]:
    """The entry that vLLM uses, and what Triton specializes for."""
    return min(table, key=lambda tuned_for: abs(tuned_for - num_tokens)), num_tokens % 2 == 0


def test_warm_up_compiles_each_kernel_that_a_step_beyond_the_graphs_uses(table: dict[int, object]) -> None:
    used = {kernel(table, num_tokens) for num_tokens in range(GRAPH_TOKENS + 1, MAX_NUM_BATCHED_TOKENS + 1)}
    assert used <= {kernel(table, num_tokens) for num_tokens in expert_warm_up_sizes(MAX_NUM_BATCHED_TOKENS)}


@pytest.mark.parametrize("max_num_batched_tokens", [256, 512, 513, 2048])
def test_warm_up_respects_the_step_limit(max_num_batched_tokens: int) -> None:
    sizes = expert_warm_up_sizes(max_num_batched_tokens)
    assert max(sizes, default=0) <= max_num_batched_tokens
    assert (max_num_batched_tokens >= 512) == bool(sizes)
