"""Multimodal rotary embedding of queries and keys where they lie, in one Triton kernel.

vLLM's own looks up the cosines of each token first, in every layer, which is a kernel more, and its launches take the
host longer: of a prompt's steps, whose attention is not part of a CUDA graph, that is a third.
"""

import torch
import triton
import triton.language as tl

from stages.runtime.quick_launch import QuickLaunch


@triton.jit
def _turn(
    qkv_ptr,  # [n, (HEADS + others) * DIM]
    positions_ptr,  # [3, n]
    cos_sin_ptr,  # [positions, DIM]: cosines, then sines
    qkv_stride,
    positions_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    TIME_SECTION: tl.constexpr,
    HEIGHT_SECTION: tl.constexpr,
):
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0)
    i = tl.arange(0, HALF)
    axis = tl.where(i < TIME_SECTION, 0, tl.where(i < TIME_SECTION + HEIGHT_SECTION, 1, 2))
    position = tl.load(positions_ptr + axis * positions_stride + token)
    cos = tl.load(cos_sin_ptr + position * DIM + i).to(tl.float32)[None, :]
    sin = tl.load(cos_sin_ptr + position * DIM + HALF + i).to(tl.float32)[None, :]
    head = tl.arange(0, PADDED_HEADS)
    first = qkv_ptr + token.to(tl.int64) * qkv_stride + head[:, None] * DIM + i[None, :]
    is_turned = (head < HEADS)[:, None] & (i < HALF)[None, :]
    x1 = tl.load(first, mask=is_turned, other=0.0).to(tl.float32)
    x2 = tl.load(first + HALF, mask=is_turned, other=0.0).to(tl.float32)
    dtype = qkv_ptr.dtype.element_ty
    tl.store(first, (x1 * cos - x2 * sin).to(dtype), mask=is_turned)
    tl.store(first + HALF, (x2 * cos + x1 * sin).to(dtype), mask=is_turned)


class RopeInPlace:
    """The kernel for the heads of one model."""

    def __init__(self, num_heads: int, head_dim: int, mrope_section: tuple[int, int, int]) -> None:
        """`num_heads`: of queries and of keys, which follow each other. `mrope_section`: how many of the head_dim / 2
        frequencies turn by time, height and width."""
        if head_dim & (head_dim - 1) or sum(mrope_section) != head_dim // 2:
            raise ValueError(f"no kernel for heads of {head_dim} with mrope_section {mrope_section}")
        time, height, _ = mrope_section
        self._constants = (num_heads, head_dim, 1 << (num_heads - 1).bit_length(), time, height)
        self._launch = QuickLaunch(_turn)

    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
        """Turn the first heads of each row of `qkv` `[n, >= num_heads * head_dim]`. `positions` `[3, n]`; `cos_sin`
        `[positions, head_dim]`, cosines before sines. Last dimensions are contiguous."""
        self._launch(
            (qkv.shape[0], 1, 1), qkv, positions, cos_sin, qkv.stride(0), positions.stride(0), *self._constants
        )
