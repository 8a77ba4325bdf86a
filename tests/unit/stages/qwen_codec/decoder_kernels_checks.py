"""Run by test_kernels.py in Triton's interpreter: the kernels against torch's operations, with their
roundings."""

from typing import Any

import pytest
import torch
import triton.language as tl
from torch.nn import functional
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorConfig,
)
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from stages.qwen_codec.code_predictor import CodePredictor
from stages.qwen_codec.decoder_kernels import KernelOperations
from stages.qwen_codec.decoder_operations import DecoderOperations

EPSILON = 1e-6
MAX_ROWS = 70  # more than a tile
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bfloat16 of a GPU: of its own, it cuts values off, and takes them for integers in products."""
    product, truncated = InterpreterBuilder.create_dot, InterpreterBuilder.create_fp_trunc

    def create_dot(self: InterpreterBuilder, a: Any, b: Any, *others: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.create_fp_ext(operand, tl.float32) for operand in (a, b))
        return product(self, a, b, *others)

    def create_fp_trunc(self: InterpreterBuilder, values: Any, dtype: Any) -> Any:
        if dtype.scalar != tl.bfloat16:
            return truncated(self, values, dtype)
        return TensorHandle(torch.tensor(values.data).bfloat16().view(torch.uint16).numpy(), tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "create_fp_trunc", create_fp_trunc)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def attention_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like the kernel's, which rounds only what goes in and comes out; torch's rounds the weights, too."""
    attention = functional.scaled_dot_product_attention

    def in_float32(*inputs: torch.Tensor, **options: bool) -> torch.Tensor:
        return attention(*(each.float() for each in inputs), **options).to(inputs[0].dtype)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", in_float32)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """In 16 bits, nearly all values are equal, so both round at the same places. Sums of float32 that end
    near the middle of two values of 16 bits may be rounded to either."""
    if expected.dtype == torch.float32:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        return
    assert (found != expected).float().mean() < 0.01
    tolerance = 2 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


# Sizes that no tile divides; the last is the widest of the published predictor's, with fewer outputs.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("has_norm", "has_residual"), [(False, False), (True, True)])
@pytest.mark.parametrize(
    "shape", [(1, 33, 200), (2, 40, 200), (MAX_ROWS, 50, 80), (1, 16, 3072), (4, 32, 3072)]
)
def test_products(
    shape: tuple[int, int, int], has_norm: bool, has_residual: bool, dtype: torch.dtype
) -> None:
    """Rows have a stride."""
    rows, outputs, inputs = shape
    hidden = torch.randn(2 * rows, inputs, dtype=dtype)[1::2]
    weight = torch.randn(outputs, inputs, dtype=dtype)
    norm = torch.randn(inputs, dtype=dtype) if has_norm else None
    residual = torch.randn(rows, outputs, dtype=dtype) if has_residual else None
    expected, found = (
        operations.linear(hidden, weight, norm=norm, residual=residual)
        for operations in (DecoderOperations(EPSILON), KernelOperations(EPSILON))
    )
    assert_same(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 33, 200), (3, 33, 48), (MAX_ROWS, 50, 80), (2, 32, 1024)])
def test_gated_products(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, outputs, inputs = shape
    hidden, norm = torch.randn(rows, inputs, dtype=dtype), torch.randn(inputs, dtype=dtype)
    weight = torch.randn(2 * outputs, inputs, dtype=dtype)
    expected, found = (
        operations.gated_linear(hidden, weight, norm=norm)
        for operations in (DecoderOperations(EPSILON), KernelOperations(EPSILON))
    )
    assert_same(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(4, 2, 16), (3, 1, 32), (2, 1, 128)])
def test_attention_reads_and_extends_the_cache(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Two positions at once and then one after the other, with a cache for more frames than there are. Its
    other entries are never read: they are NaN."""
    heads, kv_heads, head_dim = sizes
    frames, length = 3, 6
    norms = (torch.randn(head_dim, dtype=dtype), torch.randn(head_dim, dtype=dtype))
    angles = torch.randn(length, head_dim // 2).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    shape = (2, frames + 1, kv_heads, length, head_dim)
    caches = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)]
    first = 0
    while first < length:
        count = 2 if first == 0 else 1
        qkv = torch.randn(frames * count, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
        expected, found = (
            operations.attention(qkv, norms, cos, sin, cache, first, count)
            for operations, cache in zip(
                (DecoderOperations(EPSILON), KernelOperations(EPSILON)), caches, strict=True
            )
        )
        assert_same(found, expected)
        first += count
    tolerance = 1e-5 if dtype == torch.float32 else 0.0
    torch.testing.assert_close(caches[1], caches[0], atol=tolerance, rtol=tolerance, equal_nan=True)
    assert caches[1][:, frames].isnan().all()


@torch.no_grad()
@pytest.mark.parametrize(("talker_width", "count"), [(32, 1), (64, 3)], ids=["equally wide", "projected"])
def test_the_codes_of_a_frame(talker_width: int, count: int) -> None:
    config = Qwen3OmniMoeTalkerCodePredictorConfig(
        num_code_groups=5,
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    predictor = CodePredictor(config, talker_width, max_batch_size=4)
    for weight in predictor.parameters():
        torch.nn.init.normal_(weight, std=0.3 if weight.dim() > 1 else 1.0)
    hidden, embedded = torch.randn(2, count, talker_width)

    def codes(operations: DecoderOperations) -> torch.Tensor:
        predictor.operations = operations
        made: torch.Tensor = predictor(hidden, embedded, lambda logits, codebook: logits.argmax(-1))
        return made

    assert torch.equal(codes(KernelOperations(EPSILON)), codes(DecoderOperations(EPSILON)))
