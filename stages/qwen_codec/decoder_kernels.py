"""What a layer of the code predictor computes, in five Triton kernels.

A frame has 15 steps of five layers each. They are so small that a kernel takes longer to start than to read
its weights, and torch needs 57 kernels for a layer. Here norms, gates and residuals are part of the products,
and attention is one kernel. Values are rounded where torch's operations round, except within attention. On an
H200 in bfloat16, a frame of the published size takes 2.3 instead of 9.7 ms for one row and 5.1 instead of
11.7 ms for 64 (benchmarks/history.md).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from stages.qwen_codec.decoder_operations import DecoderOperations
from stages.runtime.kernel_launch import CachedLaunch


@triton.jit
def _finished(
    y, up, residual_ptr, at, inside, GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, dtype: tl.constexpr
):
    """A product and, if gated, that of the other half, in float32: gated, or with the residual added. The
    store of the result rounds it."""
    y = y.to(dtype).to(tl.float32)
    if GATED:
        silu = (y / (1.0 + tl.exp(-y))).to(dtype).to(tl.float32)
        y = silu * up.to(dtype).to(tl.float32)
    elif HAS_RESIDUAL:
        y += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit
def _row_linear(
    x_ptr,  # [K]
    norm_ptr,  # [K]
    w_ptr,  # [N, K], or [2 * N, K] if GATED
    residual_ptr,  # [N]
    y_ptr,  # [N]
    epsilon,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # at least K
):
    """The product of one row; sums in float32."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_output, is_input = n < N, k < K
    inside = is_output[:, None] & is_input[None, :]
    dtype = y_ptr.dtype.element_ty
    w = tl.load(w_ptr + n[:, None] * K + k[None, :], mask=inside, other=0.0)
    up = w
    if GATED:
        up = tl.load(w_ptr + (N + n)[:, None] * K + k[None, :], mask=inside, other=0.0)
    x = tl.load(x_ptr + k, mask=is_input, other=0.0).to(tl.float32)
    if HAS_NORM:
        norm = tl.load(norm_ptr + k, mask=is_input, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x) / K + epsilon)
        x = ((x * scale).to(dtype).to(tl.float32) * norm).to(dtype).to(tl.float32)
    y = tl.sum(w.to(tl.float32) * x[None, :], 1)
    if GATED:
        upper = tl.sum(up.to(tl.float32) * x[None, :], 1)
    else:
        upper = y
    y = _finished(y, upper, residual_ptr, n, is_output, GATED, HAS_RESIDUAL, dtype)
    tl.store(y_ptr + n, y, mask=is_output)


@triton.jit(do_not_specialize=["M"])
def _linear(
    x_ptr,  # [M, K], by stride
    norm_ptr,  # [K]
    w_ptr,  # [N, K], or [2 * N, K] if GATED
    residual_ptr,  # [M, N]
    y_ptr,  # [M, N]
    epsilon,
    x_stride,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The product of several rows on tensor cores, with the weight's rows as those of a tile; sums in
    float32."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row, is_output = m < M, n < N
    dtype = y_ptr.dtype.element_ty
    if HAS_NORM:
        squares = tl.zeros([BLOCK_M], tl.float32)
        for first in tl.static_range(0, K, BLOCK_K):
            column = first + tl.arange(0, BLOCK_K)
            is_there = is_row[:, None] & (column < K)[None, :]
            row = tl.load(x_ptr + m[:, None] * x_stride + column[None, :], mask=is_there, other=0.0)
            squares += tl.sum(row.to(tl.float32) * row.to(tl.float32), 1)
        scale = tl.rsqrt(squares / K + epsilon)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        is_input = k < K
        inside = is_output[:, None] & is_input[None, :]
        w = tl.load(w_ptr + n[:, None] * K + k[None, :], mask=inside, other=0.0)
        x = tl.load(
            x_ptr + m[None, :] * x_stride + k[:, None], mask=is_row[None, :] & is_input[:, None], other=0.0
        )
        if HAS_NORM:
            norm = tl.load(norm_ptr + k, mask=is_input, other=0.0).to(tl.float32)
            normed = (x.to(tl.float32) * scale[None, :]).to(dtype).to(tl.float32)
            x = (normed * norm[:, None]).to(dtype)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GATED:
            up = tl.load(w_ptr + (N + n)[:, None] * K + k[None, :], mask=inside, other=0.0)
            up_acc = tl.dot(up, x, up_acc, input_precision="ieee")
    at = m[None, :] * N + n[:, None]
    is_there = is_row[None, :] & is_output[:, None]
    y = _finished(acc, up_acc, residual_ptr, at, is_there, GATED, HAS_RESIDUAL, dtype)
    tl.store(y_ptr + at, y, mask=is_there)


@triton.jit
def _normed_and_rotated(
    lower, upper, norm_ptr, cos_ptr, sin_ptr, epsilon, HALF: tl.constexpr, dtype: tl.constexpr
):
    """The halves `[rows, HALF]` of heads, in float32, after the norm and the rotary embedding."""
    i = tl.arange(0, HALF)
    scale = tl.rsqrt((tl.sum(lower * lower, 1) + tl.sum(upper * upper, 1)) / (2 * HALF) + epsilon)[:, None]
    lower_norm, upper_norm = tl.load(norm_ptr + i)[None, :], tl.load(norm_ptr + HALF + i)[None, :]
    lower = ((lower * scale).to(dtype).to(tl.float32) * lower_norm.to(tl.float32)).to(dtype).to(tl.float32)
    upper = ((upper * scale).to(dtype).to(tl.float32) * upper_norm.to(tl.float32)).to(dtype).to(tl.float32)
    # Cosines and sines are those of the first half once more.
    cos, sin = tl.load(cos_ptr + i).to(tl.float32)[None, :], tl.load(sin_ptr + i).to(tl.float32)[None, :]
    rotated_lower = (lower * cos).to(dtype).to(tl.float32) - (upper * sin).to(dtype).to(tl.float32)
    rotated_upper = (upper * cos).to(dtype).to(tl.float32) + (lower * sin).to(dtype).to(tl.float32)
    return rotated_lower.to(dtype), rotated_upper.to(dtype)


@triton.jit(do_not_specialize=["first"])
def _attention(
    qkv_ptr,  # [n * COUNT, (HEADS + 2 * KV_HEADS) * DIM]
    query_norm_ptr,  # [DIM]
    key_norm_ptr,  # [DIM]
    cos_ptr,  # [LENGTH, DIM]
    sin_ptr,  # [LENGTH, DIM]
    cache_ptr,  # [2, >= n, KV_HEADS, LENGTH, DIM], by strides
    out_ptr,  # [n * COUNT, HEADS * DIM]
    epsilon,
    scale,
    first,
    cache_values_stride,
    cache_frame_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    LENGTH: tl.constexpr,
    COUNT: tl.constexpr,
    GROUP: tl.constexpr,  # queries of a key, to the next power of two
    TILE: tl.constexpr,  # LENGTH, to the next power of two
):
    """One program per frame and key head, which takes the frame's positions in order."""
    frame, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = DIM // 2
    QUERIES: tl.constexpr = HEADS // KV_HEADS
    dtype = out_ptr.dtype.element_ty
    i, g, t = tl.arange(0, HALF), tl.arange(0, GROUP), tl.arange(0, TILE)
    head = tl.arange(0, 1)[:, None] * DIM + i[None, :]
    heads = g[:, None] * DIM + i[None, :]
    past = t[:, None] * DIM + i[None, :]
    is_query = (g < QUERIES)[:, None]
    keys = cache_ptr + frame * cache_frame_stride + kv_head * (LENGTH * DIM)
    values = keys + cache_values_stride
    for index in tl.static_range(COUNT):
        position = first + index
        row = qkv_ptr + (frame * COUNT + index) * ((HEADS + 2 * KV_HEADS) * DIM)
        cos, sin = cos_ptr + position * DIM, sin_ptr + position * DIM

        key = row + (HEADS + kv_head) * DIM + head
        lower, upper = tl.load(key).to(tl.float32), tl.load(key + HALF).to(tl.float32)
        k1, k2 = _normed_and_rotated(lower, upper, key_norm_ptr, cos, sin, epsilon, HALF, dtype)
        tl.store(keys + position * DIM + head, k1)
        tl.store(keys + position * DIM + HALF + head, k2)
        value = row + (HEADS + KV_HEADS + kv_head) * DIM + head
        tl.store(values + position * DIM + head, tl.load(value))
        tl.store(values + position * DIM + HALF + head, tl.load(value + HALF))
        tl.debug_barrier()  # what other threads of the program have stored is read below

        query = row + kv_head * QUERIES * DIM + heads
        lower = tl.load(query, mask=is_query, other=0.0).to(tl.float32)
        upper = tl.load(query + HALF, mask=is_query, other=0.0).to(tl.float32)
        q1, q2 = _normed_and_rotated(lower, upper, query_norm_ptr, cos, sin, epsilon, HALF, dtype)
        is_seen = t <= position
        past_k1 = tl.load(keys + past, mask=is_seen[:, None], other=0.0).to(tl.float32)
        past_k2 = tl.load(keys + HALF + past, mask=is_seen[:, None], other=0.0).to(tl.float32)
        past_v1 = tl.load(values + past, mask=is_seen[:, None], other=0.0).to(tl.float32)
        past_v2 = tl.load(values + HALF + past, mask=is_seen[:, None], other=0.0).to(tl.float32)
        score = tl.sum(q1.to(tl.float32)[:, None, :] * past_k1[None, :, :], 2)
        score += tl.sum(q2.to(tl.float32)[:, None, :] * past_k2[None, :, :], 2)
        score = tl.where(is_seen[None, :], score * scale, float("-inf"))
        weight = tl.exp(score - tl.max(score, 1)[:, None])
        weight = (weight / tl.sum(weight, 1)[:, None])[:, :, None]
        out = out_ptr + (frame * COUNT + index) * (HEADS * DIM) + kv_head * QUERIES * DIM + heads
        tl.store(out, tl.sum(weight * past_v1[None, :, :], 1), mask=is_query)
        tl.store(out + HALF, tl.sum(weight * past_v2[None, :, :], 1), mask=is_query)


_launch_row_linear = CachedLaunch(_row_linear)
_launch_linear = CachedLaunch(_linear)
_launch_attention = CachedLaunch(_attention)

# Tried on an H200 with the published size: benchmarks/history.md.
_WEIGHTS_PER_ROW_PROGRAM = 4096
_MAX_ROWS_PER_TILE = 64
_BYTES_PER_TILE_ROW = 512
_NUM_STAGES = 3


@dataclass(frozen=True)
class _Tile:
    rows: int
    outputs: int
    inputs: int


def _tile(rows: int, outputs: int, inputs: int, itemsize: int) -> _Tile:
    """For several rows. Narrow tiles for products with few outputs, which would otherwise keep few of the
    multiprocessors busy."""
    of_rows = min(_MAX_ROWS_PER_TILE, max(16, triton.next_power_of_2(rows)))
    row_bytes = _BYTES_PER_TILE_ROW // (2 if of_rows == _MAX_ROWS_PER_TILE else 1)
    of_inputs = min(row_bytes // itemsize, max(16, triton.next_power_of_2(inputs)))
    return _Tile(of_rows, 16 if outputs <= 1024 else 32, of_inputs)


class KernelOperations(DecoderOperations):
    """Weights must be contiguous."""

    def linear(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._product(hidden, weight, norm, residual, is_gated=False)

    def gated_linear(self, hidden: torch.Tensor, weight: torch.Tensor, *, norm: torch.Tensor) -> torch.Tensor:
        return self._product(hidden, weight, norm, None, is_gated=True)

    def _product(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        norm: torch.Tensor | None,
        residual: torch.Tensor | None,
        *,
        is_gated: bool,
    ) -> torch.Tensor:
        (rows, inputs), outputs = hidden.shape, len(weight) // (2 if is_gated else 1)
        y = hidden.new_empty(rows, outputs)
        tensors = (
            hidden,
            hidden if norm is None else norm,
            weight,
            hidden if residual is None else residual,
            y,
        )
        parts = (norm is not None, is_gated, residual is not None)
        if rows == 1:
            of_inputs = triton.next_power_of_2(inputs)
            of_outputs = max(1, _WEIGHTS_PER_ROW_PROGRAM // (of_inputs * (2 if is_gated else 1)))
            _launch_row_linear(
                (triton.cdiv(outputs, of_outputs), 1, 1),
                *tensors,
                self._epsilon,
                outputs,
                inputs,
                *parts,
                of_outputs,
                of_inputs,
                num_warps=4,
            )
            return y
        tile = _tile(rows, outputs, inputs, hidden.element_size())
        _launch_linear(
            (triton.cdiv(outputs, tile.outputs), triton.cdiv(rows, tile.rows), 1),
            *tensors,
            self._epsilon,
            hidden.stride(0),
            rows,
            outputs,
            inputs,
            *parts,
            tile.rows,
            tile.outputs,
            tile.inputs,
            _NUM_STAGES,
            num_warps=4,
        )
        return y

    def attention(
        self,
        qkv: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor],
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: torch.Tensor,
        first: int,
        count: int,
    ) -> torch.Tensor:
        kv_heads, length, head_dim = cache.shape[2:]
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        attended = qkv.new_empty(len(qkv), heads * head_dim)
        _launch_attention(
            (len(qkv) // count, kv_heads, 1),
            qkv,
            *norms,
            cos,
            sin,
            cache,
            attended,
            self._epsilon,
            head_dim**-0.5,
            first,
            cache.stride(0),
            cache.stride(1),
            heads,
            kv_heads,
            head_dim,
            length,
            count,
            triton.next_power_of_2(heads // kv_heads),
            triton.next_power_of_2(length),
            num_warps=4,
        )
        return attended
