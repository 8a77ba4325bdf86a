"""Run by test_kernels.py in Triton's interpreter."""

import pytest
import torch

from stages.runtime import small_batch_gemm
from stages.runtime.small_batch_gemm_kernel import MAX_ROWS, GemvPlan, Scratch, SplitKPlan, plan

CPU = torch.device("cpu")


def operands(
    num_rows: int, num_outputs: int, num_inputs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(num_outputs)
    x, weight = torch.randn(num_rows, num_inputs), torch.randn(num_outputs, num_inputs)
    return x, weight, torch.randn(num_outputs)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("shape", "chosen"),
    [
        ((1, 40, 200), GemvPlan(1, 256, 4)),
        ((1, 33, 96), GemvPlan(8, 64, 4)),
        ((1, 40, 200), SplitKPlan(16, 64, 1)),
        ((5, 96, 640), SplitKPlan(16, 64, 2)),
        ((MAX_ROWS, 33, 300), SplitKPlan(16, 64, 8)),
        *[((rows, 96, 3072), plan(rows, 1024, 3072)) for rows in (1, 2)],  # as in Qwen3-TTS-0.6B
        ((1, 48, 6144), plan(1, 2048, 6144)),  # as in 1.7B
    ],
)
def test_rows_by_tiles_in_any_number_of_splits(
    shape: tuple[int, int, int], chosen: GemvPlan | SplitKPlan, has_bias: bool
) -> None:
    """Splits beyond the end of the input are empty. Twice with one scratch: it is left as it was found."""
    x, weight, bias = operands(*shape)
    scratch = Scratch(shape[1], CPU)
    expected = torch.nn.functional.linear(x, weight, bias if has_bias else None)
    for _ in range(2):
        y = scratch.product(chosen, x, weight, bias if has_bias else None)
        torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)


def test_the_operator_takes_rows_of_any_layout_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight, bias = operands(1, 48, 160)
    monkeypatch.setitem(small_batch_gemm._scratches, CPU, Scratch(48, CPU))
    inputs = (
        torch.randn(1, 160),
        torch.randn(3, 320)[:, ::2],
        torch.randn(2, 4, 160),
        torch.randn(160, 7).T,
        torch.randn(0, 160),
        torch.randn(MAX_ROWS + 1, 160),
    )
    for x in inputs:
        y = torch.ops.vllm.omni_small_batch_linear(x, weight, bias)
        torch.testing.assert_close(y, torch.nn.functional.linear(x, weight, bias), atol=1e-4, rtol=1e-4)
        torch.library.opcheck(torch.ops.vllm.omni_small_batch_linear.default, (x, weight, bias))


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(896, 18944), (896, 1536), (3584, 18944), (37888, 896), (8, 100000)]
)
def test_splits_fill_a_gpu_and_fit_the_scratch(num_outputs: int, num_inputs: int) -> None:
    chosen = plan(4, num_outputs, num_inputs)
    assert isinstance(chosen, SplitKPlan)
    assert 1 <= chosen.splits <= 8
    tiles = -(-num_outputs // chosen.outputs)
    assert chosen.splits == 1 or tiles * chosen.splits <= 224
