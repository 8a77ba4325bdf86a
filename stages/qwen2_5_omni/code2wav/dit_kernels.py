"""`TorchDiTOps` as fused Triton kernels, which read and write each value once."""

import math

import torch
import triton
import triton.language as tl

from stages.qwen2_5_omni.code2wav.dit_ops import NORM_EPS, TorchDiTOps
from stages.qwen2_5_omni.code2wav.packing import BlockLayout
from stages.qwen2_5_omni.code2wav.stream_kv import LayerKV

MIN_DOT_SIZE = 16
"""Triton's dot needs tile sides that are powers of two from 16 up."""

ATTENTION_WARPS = 2
"""Per block and head. With one, a thread uses 237 registers, not 102, and fewer blocks are in flight."""


class TritonDiTOps(TorchDiTOps):
    """For CUDA."""

    def norm(
        self,
        hidden: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        dtype: torch.dtype,
        gated: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        num_rows, width = hidden.shape
        out = torch.empty(num_rows, width, dtype=dtype, device=hidden.device)
        gate, update = (hidden, hidden) if gated is None else gated
        _gated_norm[(num_rows,)](
            hidden,
            update,
            gate,
            scale,
            shift,
            out,
            width,
            NORM_EPS,
            HAS_UPDATE=gated is not None,
            TILE=triton.next_power_of_2(width),
            num_warps=4,
        )
        return out

    def linear_gelu(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32:
            return super().linear_gelu(x, weight, bias)
        # Uses cuBLASLt's epilogue, which applies GELU before the product is written.
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)

    def attention(
        self,
        qkv: torch.Tensor,
        layout: BlockLayout,
        rotary: torch.Tensor,
        *,
        head_dim: int,
        back: bool,
        ahead: bool,
        kept: LayerKV | None,
    ) -> torch.Tensor:
        num_rows, inner = qkv.shape[0], qkv.shape[1] // 3
        out = torch.empty(num_rows, inner, dtype=qkv.dtype, device=qkv.device)
        _block_attention[(num_rows // layout.block_size, inner // head_dim)](
            qkv,
            out,
            rotary,
            rotary.shape[1] * rotary.shape[2],
            layout.index,
            layout.num_frames,
            layout.has_previous,
            layout.has_next,
            layout.num_blocks,
            inner,
            head_dim**-0.5 * math.log2(math.e),
            kept.values if kept is not None else qkv,
            kept.values.stride(0) if kept is not None else 0,
            kept.values.stride(1) if kept is not None else 0,
            kept.interval if kept is not None else layout.index,
            layout.read_slot,
            BLOCK_SIZE=layout.block_size,
            HALF_DIM=head_dim // 2,
            BACK=back,
            AHEAD=ahead,
            READS_SLOTS=back and kept is not None,
            TILE=max(MIN_DOT_SIZE, triton.next_power_of_2(layout.block_size)),
            PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
            num_warps=ATTENTION_WARPS,
        )
        return out

    def keep(self, qkv: torch.Tensor, layout: BlockLayout, kept: LayerKV) -> None:
        num_rows, inner = qkv.shape[0], qkv.shape[1] // 3
        _keep_frame[(num_rows // layout.block_size, layout.block_size)](
            qkv,
            kept.values,
            kept.values.stride(0),
            kept.values.stride(1),
            kept.interval,
            layout.kept_slot,
            layout.num_blocks,
            inner,
            BLOCK_SIZE=layout.block_size,
            TILE=triton.next_power_of_2(2 * inner),
            num_warps=4,
        )


@triton.jit
def _gated_norm(
    hidden_ptr, update_ptr, gate_ptr, scale_ptr, shift_ptr, out_ptr, width, eps,
    HAS_UPDATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.arange(0, TILE)
    inside = columns < width
    x = tl.load(hidden_ptr + row * width + columns, mask=inside, other=0.0)
    if HAS_UPDATE:
        update = tl.load(update_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        x += tl.load(gate_ptr + columns, mask=inside, other=0.0) * update
        tl.store(hidden_ptr + row * width + columns, x, mask=inside)
    mean = tl.sum(x) / width
    centred = tl.where(inside, x - mean, 0.0)
    variance = tl.sum(centred * centred) / width
    scale = tl.load(scale_ptr + columns, mask=inside, other=0.0)
    shift = tl.load(shift_ptr + columns, mask=inside, other=0.0)
    normed = centred * tl.rsqrt(variance + eps) * (1.0 + scale) + shift
    tl.store(out_ptr + row * width + columns, normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_turned(
    head_ptr, row_stride, num_rows, angles_ptr, rotary_stride, is_turned, TILE: tl.constexpr, HALF_DIM: tl.constexpr
):  # fmt: skip
    """Loads one head of queries or keys at `head_ptr`, [TILE, 2 * HALF_DIM], zeros after `num_rows`. If
    `is_turned`, applies the rotary embedding from `angles_ptr`'s position on."""
    rows, columns = tl.arange(0, TILE)[:, None], tl.arange(0, 2 * HALF_DIM)[None, :]
    inside = rows < num_rows
    x = tl.load(head_ptr + rows * row_stride + columns, mask=inside, other=0.0)
    if is_turned:
        # A pair is (even, odd), HALF_DIM apart: even * cos - odd * sin, odd * cos + even * sin.
        partners = tl.where(columns < HALF_DIM, columns + HALF_DIM, columns - HALF_DIM)
        pair = tl.load(head_ptr + rows * row_stride + partners, mask=inside, other=0.0)
        angles = angles_ptr + rows * HALF_DIM + columns % HALF_DIM
        cos = tl.load(angles, mask=inside, other=1.0)
        sin = tl.load(angles + rotary_stride, mask=inside, other=0.0)
        x = (x * cos + pair * tl.where(columns < HALF_DIM, -sin, sin)).to(x.dtype)
    return x


@triton.jit
def _attend(
    key_ptr, inner, row_stride, num_keys, angles_ptr, rotary_stride, is_turned,
    query, m_i, l_i, acc, scale,
    TILE: tl.constexpr, HALF_DIM: tl.constexpr, IS_FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds `num_keys` keys at `key_ptr`, and their values `inner` columns further on, to a running softmax,
    which IS_FIRST starts. scale: factor of the products, for powers of 2."""
    key = _load_turned(key_ptr, row_stride, num_keys, angles_ptr, rotary_stride, is_turned, TILE, HALF_DIM)
    rows, columns = tl.arange(0, TILE), tl.arange(0, 2 * HALF_DIM)
    is_key = rows < num_keys
    value_offsets = inner + rows[:, None] * row_stride + columns[None, :]
    values = tl.load(key_ptr + value_offsets, mask=is_key[:, None], other=0.0)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    scores = tl.where(is_key[None, :], scores, float("-inf"))
    m_new = tl.max(scores, 1)
    if not IS_FIRST:
        m_new = tl.maximum(m_i, m_new)
    p = tl.exp2(scores - m_new[:, None])
    l_new = tl.sum(p, 1)
    if IS_FIRST:
        acc_new = tl.dot(p.to(values.dtype), values, input_precision=PRECISION)
    else:
        alpha = tl.exp2(m_i - m_new)
        l_new += l_i * alpha
        acc_new = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision=PRECISION)
    return m_new, l_new, acc_new


@triton.jit
def _block_attention(
    qkv_ptr, out_ptr, rotary_ptr, rotary_stride, index_ptr, num_frames_ptr, has_previous_ptr, has_next_ptr,
    num_blocks, inner, scale, kept_ptr, slot_stride, interval_stride, interval_ptr, read_slot_ptr,
    BLOCK_SIZE: tl.constexpr, HALF_DIM: tl.constexpr, BACK: tl.constexpr, AHEAD: tl.constexpr,
    READS_SLOTS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Each program computes one head of one block, with up to 3 * BLOCK_SIZE keys per query."""
    block, head = tl.program_id(0), tl.program_id(1)
    entry = block % num_blocks
    row_stride = 3 * inner
    block_stride = BLOCK_SIZE * row_stride
    is_turned = head == 0  # the other heads have no rotary embedding
    angles = rotary_ptr + tl.load(index_ptr + entry) * BLOCK_SIZE * HALF_DIM
    angles_step = BLOCK_SIZE * HALF_DIM
    query_ptr = qkv_ptr + block.to(tl.int64) * block_stride + head * 2 * HALF_DIM
    key_ptr = query_ptr + inner
    query = _load_turned(query_ptr, row_stride, BLOCK_SIZE, angles, rotary_stride, is_turned, TILE, HALF_DIM)
    num_keys = tl.load(num_frames_ptr + entry)
    m_i, l_i, acc = _attend(
        key_ptr, inner, row_stride, num_keys, angles, rotary_stride, is_turned,
        query, 0.0, 0.0, 0.0, scale, TILE, HALF_DIM, True, PRECISION,
    )  # fmt: skip
    if BACK:
        has_previous = tl.load(has_previous_ptr + entry)
        if has_previous != 0:
            num_keys = tl.load(num_frames_ptr + entry - 1)
            m_i, l_i, acc = _attend(
                key_ptr - block_stride, inner, row_stride, num_keys, angles - angles_step, rotary_stride, is_turned,
                query, m_i, l_i, acc, scale, TILE, HALF_DIM, False, PRECISION,
            )  # fmt: skip
    if READS_SLOTS:
        slot = tl.load(read_slot_ptr + entry)
        if slot >= 0:  # the previous block is another window's
            kept_block = kept_ptr + slot.to(tl.int64) * slot_stride + tl.load(interval_ptr) * interval_stride
            kept_key = kept_block + block // num_blocks * BLOCK_SIZE * 2 * inner + head * 2 * HALF_DIM
            m_i, l_i, acc = _attend(
                kept_key, inner, 2 * inner, BLOCK_SIZE, angles - angles_step, rotary_stride, is_turned,
                query, m_i, l_i, acc, scale, TILE, HALF_DIM, False, PRECISION,
            )  # fmt: skip
    if AHEAD:
        has_next = tl.load(has_next_ptr + entry)
        if has_next != 0:
            num_keys = tl.load(num_frames_ptr + entry + 1)
            m_i, l_i, acc = _attend(
                key_ptr + block_stride, inner, row_stride, num_keys, angles + angles_step, rotary_stride, is_turned,
                query, m_i, l_i, acc, scale, TILE, HALF_DIM, False, PRECISION,
            )  # fmt: skip
    acc *= (1.0 / l_i)[:, None]
    rows, columns = tl.arange(0, TILE)[:, None], tl.arange(0, 2 * HALF_DIM)[None, :]
    block_out = out_ptr + block.to(tl.int64) * BLOCK_SIZE * inner + head * 2 * HALF_DIM
    outputs = acc.to(out_ptr.dtype.element_ty)
    tl.store(block_out + rows * inner + columns, outputs, mask=rows < BLOCK_SIZE)


@triton.jit
def _keep_frame(
    qkv_ptr, kept_ptr, slot_stride, interval_stride, interval_ptr, kept_slot_ptr, num_blocks, inner,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Each program copies one frame's keys and values if its block is kept."""
    block, frame = tl.program_id(0), tl.program_id(1)
    slot = tl.load(kept_slot_ptr + block % num_blocks)
    if slot >= 0:
        columns = tl.arange(0, TILE)
        inside = columns < 2 * inner
        values = tl.load(qkv_ptr + (block * BLOCK_SIZE + frame) * 3 * inner + inner + columns, mask=inside)
        block_ptr = kept_ptr + slot.to(tl.int64) * slot_stride + tl.load(interval_ptr) * interval_stride
        offset = ((block // num_blocks) * BLOCK_SIZE + frame) * 2 * inner
        tl.store(block_ptr + offset + columns, values, mask=inside)
