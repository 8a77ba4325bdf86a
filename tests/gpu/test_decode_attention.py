"""Compiled, the kernel for a decoding step's attention is exact."""

import pytest
import torch

from stages.runtime.attention_kernels import RopeInPlace
from tests.unit.stages.attention_step import Sizes, Step

pytestmark = pytest.mark.gpu

MODELS = {"thinker": Sizes(28, 4, 128, (16, 24, 24)), "talker": Sizes(12, 4, 128, (16, 24, 24))}
"""Qwen2.5-Omni-7B's"""

MAX_ERROR = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of values around 1; the last digit of bfloat16 is 8e-3."""


@pytest.mark.parametrize("dtype", list(MAX_ERROR))
@pytest.mark.parametrize(
    "lengths",
    [[1], [129, 128, 17, 2], [5000, 0, 40], [3 + 9 * k for k in range(64)]],
    ids=lambda lengths: f"{len(lengths)} requests up to {max(lengths)}",
)
@pytest.mark.parametrize("model", list(MODELS))
def test_out_and_cache_are_exact_and_repeat(model: str, lengths: list[int], dtype: torch.dtype) -> None:
    """Against float64 on the same bits; bit for bit the same each time, whichever part ends last."""
    sizes = MODELS[model]
    step = Step(sizes, lengths, device="cuda", dtype=dtype)
    attention = sizes.kernel("cuda")
    out, cache = step.expected()
    step.run(attention)
    first = step.out.clone()
    assert (step.out.double() - out).abs().max().item() <= MAX_ERROR[dtype]
    assert (step.cache.double() - cache).abs().max().item() <= MAX_ERROR[dtype]
    for _ in range(20):
        step.run(attention)
        assert torch.equal(step.out, first)


@pytest.mark.parametrize("dtype", list(MAX_ERROR))
@pytest.mark.parametrize("num_tokens", [1, 5000])
@pytest.mark.parametrize("model", list(MODELS))
def test_the_rotary_embedding_of_a_prompt_is_exact(model: str, num_tokens: int, dtype: torch.dtype) -> None:
    """Twice: the second launch is of the kernel that the first has compiled."""
    sizes = MODELS[model]
    turn = RopeInPlace(sizes.heads + sizes.kv_heads, sizes.dim, sizes.sections)
    for _ in range(2):
        step = Step(sizes, [1] * num_tokens, device="cuda", dtype=dtype)
        expected = step.turned_qkv()
        turn(step.qkv, step.positions, step.cos_sin)
        assert (step.qkv.double() - expected).abs().max().item() <= MAX_ERROR[dtype]
