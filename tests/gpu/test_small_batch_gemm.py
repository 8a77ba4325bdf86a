"""Compiled, the products of few rows are as exact as cuBLAS's."""

import pytest
import torch

from stages.runtime.small_batch_gemm_kernel import MAX_ROWS, Scratch, plan

pytestmark = pytest.mark.gpu

# num_outputs, num_inputs of Qwen2.5-Omni-7B's layers, and of Qwen3-TTS' talkers
SHAPES = {
    "thinker gate_up": (37888, 3584),
    "thinker down": (3584, 18944),
    "thinker qkv": (4608, 3584),
    "thinker o": (3584, 3584),
    "talker gate_up": (37888, 896),
    "talker down": (896, 18944),
    "talker qkv": (2560, 896),
    "talker o": (896, 1536),
    "talker projection": (896, 3584),
    "1.7B gate_up": (12288, 2048),
    "1.7B down": (2048, 6144),
    "1.7B qkv": (4096, 2048),
    "0.6B gate_up": (6144, 1024),
    "0.6B down": (1024, 3072),
    "0.6B head": (3072, 1024),
}
ROWS = (1, 2, 5, MAX_ROWS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", SHAPES)
def test_products_are_as_exact_as_cublas_and_repeat(name: str, dtype: torch.dtype) -> None:
    """Against float64; bit for bit the same again, in however many splits."""
    num_outputs, num_inputs = SHAPES[name]
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(num_outputs, num_inputs, device="cuda", generator=generator).to(dtype) * 0.02
    bias = torch.randn(num_outputs, device="cuda", generator=generator).to(dtype)
    scratch = Scratch(num_outputs, weight.device)
    for num_rows in ROWS:
        chosen = plan(num_rows, num_outputs, num_inputs)
        if chosen is None:
            continue
        x = torch.randn(num_rows, num_inputs, device="cuda", generator=generator).to(dtype)
        exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        ours = scratch.product(chosen, x, weight, bias)
        cublas = torch.nn.functional.linear(x, weight, bias)
        ours_error, cublas_error = ((y.double() - exact).abs().max().item() for y in (ours, cublas))
        # In float32 the order of the sum shows; in the others the rounding of the result outweighs it.
        assert ours_error <= 1.5 * cublas_error + 1e-5 * exact.abs().max().item(), (num_rows, chosen)
        for _ in range(20):
            assert torch.equal(scratch.product(chosen, x, weight, bias), ours), (num_rows, chosen)
