"""Products of a weight with few rows, as in decoding: as fast as the weight can be read.

With one to sixteen rows a product reads its weight once and computes next to nothing. cuBLAS takes for that two kernels
where the weight is long and narrow, and tiles that leave a part of a large GPU's memory bandwidth unused. The kernels
here and the table of their shapes, `plan`, were measured on an H200 with the weights of Qwen2.5-Omni-7B
(docs/performance.md, "Products of few rows").
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_ROWS = 16
"""The tensor cores' narrowest tile; a tile is always that wide."""

_PROGRAMS_WANTED = 224
"""Programs that read at once; a weight with fewer tiles is cut along its input, too."""

_MAX_PARTS = 8


@dataclass(frozen=True)
class Dots:
    """Products of a single row: each program has `outputs` rows of the weight, `inputs` columns at a time."""

    outputs: int
    inputs: int
    num_warps: int


@dataclass(frozen=True)
class Tiles:
    """On tensor cores: `parts` programs share the columns of a tile; the last of them to end adds up."""

    outputs: int
    inputs: int
    parts: int
    num_warps: int = 4
    num_stages: int = 6


@triton.jit
def _dots(x_ptr, w_ptr, bias_ptr, y_ptr, N, K, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """y[n] = sum over k of x[k] w[n, k]; sums in float32."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for first in range(0, K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + k, mask=k < K, other=0.0)
        w = tl.load(
            w_ptr + n[:, None].to(tl.int64) * K + k[None, :],
            mask=(n < N)[:, None] & (k < K)[None, :],
            other=0.0,
            eviction_policy="evict_first",  # nobody needs it before the next step
        )
        total += w.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(total, 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["M"])
def _tiles(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    sums_ptr,
    ended_ptr,
    M,
    N,
    K,
    PART,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y[m, n] = sum over k of x[m, k] w[n, k]; sums in float32, those of parts always in the same order."""
    tile, part = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    end = tl.minimum((part + 1) * PART, K)
    for first in tl.range(part * PART, end, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        w = tl.load(
            w_ptr + n[:, None].to(tl.int64) * K + k[None, :],
            mask=(n < N)[:, None] & (k < end)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        x = tl.load(x_ptr + m[None, :] * K + k[:, None], mask=(m < M)[None, :] & (k < end)[:, None], other=0.0)
        total = tl.dot(w, x, total, input_precision="ieee")
    at = m[None, :] * N + n[:, None]
    inside = (m < M)[None, :] & (n < N)[:, None]
    is_last = True
    if PARTS > 1:
        # Past the first-level cache: other multiprocessors write these.
        tl.store(sums_ptr + part * (ROWS * N) + at, total, mask=inside, cache_modifier=".cg")
        tl.debug_barrier()  # all threads' sums are written before one of them counts the part
        is_last = tl.atomic_add(ended_ptr + tile, 1, sem="acq_rel") == PARTS - 1
    if is_last:
        if PARTS > 1:
            tl.store(ended_ptr + tile, 0)  # as the next product wants it
            total = tl.zeros([BLOCK_N, ROWS], tl.float32)
            for other in tl.static_range(PARTS):
                total += tl.load(sums_ptr + other * (ROWS * N) + at, mask=inside, other=0.0, cache_modifier=".cg")
        if HAS_BIAS:
            total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=inside)


def plan(num_rows: int, num_outputs: int, num_inputs: int) -> Dots | Tiles | None:
    """How to multiply `[num_rows, num_inputs]` with a weight `[num_outputs, num_inputs]`; None where cuBLAS is as
    fast, or there are more than `MAX_ROWS` rows."""
    if not 1 <= num_rows <= MAX_ROWS:
        return None
    is_wide = num_outputs >= 16384
    if num_rows == 1 and not (is_wide and num_inputs <= 1024):
        if num_inputs >= 16 * num_outputs:
            return Dots(1, 4096, num_warps=4)
        if num_inputs >= 4 * num_outputs:
            return Dots(16, 1024, num_warps=8)
        if num_outputs * num_inputs <= 1 << 23:
            return Dots(8, 1024, num_warps=8)
        return Dots(16, 512, num_warps=4)
    if is_wide:
        return Tiles(64, 64, parts=1)
    if num_outputs >= 4096:
        return None
    parts = 1
    while num_inputs >= 8192 and parts < _MAX_PARTS and 2 * parts * triton.cdiv(num_outputs, 32) <= _PROGRAMS_WANTED:
        parts *= 2
    return Tiles(32, 128, parts)


class Scratch:
    """Memory for products in parts. One is enough for all products of a stream: each leaves it as it found it."""

    def __init__(self, most_outputs: int, device: torch.device) -> None:
        """`most_outputs`: the most outputs of a weight that is multiplied in parts."""
        self._sums = torch.empty(_MAX_PARTS * MAX_ROWS * most_outputs, dtype=torch.float32, device=device)
        self._ended = torch.zeros(most_outputs, dtype=torch.int32, device=device)

    def product(
        self, chosen: Dots | Tiles, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`[num_rows, num_outputs]`, of x's dtype. `x` `[num_rows, num_inputs]` and `weight`
        `[num_outputs, num_inputs]` are contiguous; `chosen` is what `plan` says for them."""
        (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0]
        y = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
        anything = x if bias is None else bias
        grid = triton.cdiv(num_outputs, chosen.outputs)
        if isinstance(chosen, Dots):
            _dots[(grid,)](
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
        part = triton.cdiv(triton.cdiv(num_inputs, chosen.parts), chosen.inputs) * chosen.inputs
        _tiles[(grid, chosen.parts)](
            x,
            weight,
            anything,
            y,
            self._sums,
            self._ended,
            num_rows,
            num_outputs,
            num_inputs,
            part,
            HAS_BIAS=bias is not None,
            ROWS=MAX_ROWS,
            BLOCK_N=chosen.outputs,
            BLOCK_K=chosen.inputs,
            PARTS=chosen.parts,
            STAGES=chosen.num_stages,
            num_warps=chosen.num_warps,
        )
        return y
