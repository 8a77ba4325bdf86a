"""Products of a weight with a small batch, as in decode, as fast as the weight can be read.

With one to sixteen rows, a product reads its weight once and computes next to nothing. For this, cuBLAS uses
two kernels if the weight is long and narrow, and tiles that leave part of a large GPU's memory bandwidth
unused. The kernels here and the table of their shapes, `plan`, were measured on an H200 with the weights of
Qwen2.5-Omni-7B (benchmarks/history.md, "Small-batch matrix products").
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_ROWS = 16
"""Narrowest tensor-core tile. Tiles always have this width."""

_TARGET_PROGRAMS = 224
"""Number of concurrent programs. A weight with fewer tiles is also split along its input ("split-K")."""

_MAX_SPLITS = 8


@dataclass(frozen=True)
class GemvPlan:
    """For a single row: each program processes `outputs` rows of the weight, `inputs` columns at a time."""

    outputs: int
    inputs: int
    num_warps: int


@dataclass(frozen=True)
class SplitKPlan:
    """On tensor cores: `splits` programs share the columns of a tile; the last to finish adds the sums."""

    outputs: int
    inputs: int
    splits: int
    num_warps: int = 4
    num_stages: int = 6


@triton.jit
def _gemv(
    x_ptr, w_ptr, bias_ptr, y_ptr, N, K, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """y[n] = sum over k of x[k] w[n, k]; sums in float32."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + k, mask=k < K, other=0.0)
        w = tl.load(
            w_ptr + n[:, None].to(tl.int64) * K + k[None, :],
            mask=(n < N)[:, None] & (k < K)[None, :],
            other=0.0,
            eviction_policy="evict_first",  # not needed again before the next step
        )
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(acc, 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["M"])
def _split_k_gemm(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    partial_ptr,
    num_done_ptr,
    M,
    N,
    K,
    K_PER_SPLIT,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y[m, n] = sum over k of x[m, k] w[n, k]; sums in float32, with the splits added in a fixed order."""
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    end = tl.minimum((split + 1) * K_PER_SPLIT, K)
    for first in tl.range(split * K_PER_SPLIT, end, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        w = tl.load(
            w_ptr + n[:, None].to(tl.int64) * K + k[None, :],
            mask=(n < N)[:, None] & (k < end)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        x = tl.load(
            x_ptr + m[None, :] * K + k[:, None], mask=(m < M)[None, :] & (k < end)[:, None], other=0.0
        )
        acc = tl.dot(w, x, acc, input_precision="ieee")
    at = m[None, :] * N + n[:, None]
    inside = (m < M)[None, :] & (n < N)[:, None]
    is_last = True
    if NUM_SPLITS > 1:
        # Bypass the L1 cache: other multiprocessors read and write these.
        tl.store(partial_ptr + split * (ROWS * N) + at, acc, mask=inside, cache_modifier=".cg")
        tl.debug_barrier()  # all threads must have written their sums before one counts the split
        is_last = tl.atomic_add(num_done_ptr + tile, 1, sem="acq_rel") == NUM_SPLITS - 1
    if is_last:
        if NUM_SPLITS > 1:
            tl.store(num_done_ptr + tile, 0)  # reset for the next product
            acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
            for other in tl.static_range(NUM_SPLITS):
                acc += tl.load(
                    partial_ptr + other * (ROWS * N) + at, mask=inside, other=0.0, cache_modifier=".cg"
                )
        if HAS_BIAS:
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=inside)


def plan(num_rows: int, num_outputs: int, num_inputs: int) -> GemvPlan | SplitKPlan | None:
    """How to multiply `[num_rows, num_inputs]` by a weight `[num_outputs, num_inputs]`. None if cuBLAS is as
    fast or there are more than `MAX_ROWS` rows."""
    if not 1 <= num_rows <= MAX_ROWS:
        return None
    is_wide = num_outputs >= 16384
    if num_rows == 1 and not (is_wide and num_inputs <= 1024):
        if num_inputs >= 16 * num_outputs:
            return GemvPlan(1, 4096, num_warps=4)
        if num_inputs >= 4 * num_outputs:
            return GemvPlan(16, 1024, num_warps=8)
        if num_outputs * num_inputs <= 1 << 23:
            return GemvPlan(8, 1024, num_warps=8)
        return GemvPlan(16, 512, num_warps=4)
    if is_wide:
        return SplitKPlan(64, 64, splits=1)
    if num_outputs >= 4096:
        return None
    splits = 1
    while (
        num_inputs >= 8192
        and splits < _MAX_SPLITS
        and 2 * splits * triton.cdiv(num_outputs, 32) <= _TARGET_PROGRAMS
    ):
        splits *= 2
    return SplitKPlan(32, 128, splits)


class Scratch:
    """Memory for split products. All products of a CUDA stream can share it, because each resets its
    counters."""

    def __init__(self, max_outputs: int, device: torch.device) -> None:
        """`max_outputs`: the most outputs of any weight with split products."""
        self._partial = torch.empty(_MAX_SPLITS * MAX_ROWS * max_outputs, dtype=torch.float32, device=device)
        self._num_done = torch.zeros(max_outputs, dtype=torch.int32, device=device)

    def product(
        self, chosen: GemvPlan | SplitKPlan, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`[num_rows, num_outputs]`, x's dtype. `x` `[num_rows, num_inputs]` and `weight`
        `[num_outputs, num_inputs]` are contiguous; `chosen` is the result of `plan` for them."""
        (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0]
        y = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
        anything = x if bias is None else bias
        grid = triton.cdiv(num_outputs, chosen.outputs)
        if isinstance(chosen, GemvPlan):
            _gemv[(grid,)](
                x,
                weight,
                anything,
                y,
                num_outputs,
                num_inputs,
                HAS_BIAS=bias is not None,
                BLOCK_N=chosen.outputs,
                BLOCK_K=chosen.inputs,
                num_warps=chosen.num_warps,
            )
            return y
        k_per_split = triton.cdiv(triton.cdiv(num_inputs, chosen.splits), chosen.inputs) * chosen.inputs
        _split_k_gemm[(grid, chosen.splits)](
            x,
            weight,
            anything,
            y,
            self._partial,
            self._num_done,
            num_rows,
            num_outputs,
            num_inputs,
            k_per_split,
            HAS_BIAS=bias is not None,
            ROWS=MAX_ROWS,
            BLOCK_N=chosen.outputs,
            BLOCK_K=chosen.inputs,
            NUM_SPLITS=chosen.splits,
            STAGES=chosen.num_stages,
            num_warps=chosen.num_warps,
        )
        return y
