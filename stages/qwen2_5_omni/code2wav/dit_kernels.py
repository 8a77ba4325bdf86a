"""`DiTOps` as fused Triton kernels: each reads and writes every value once."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from stages.qwen2_5_omni.code2wav.dit_ops import NORM_EPS
from stages.qwen2_5_omni.code2wav.packing import BlockLayout
from stages.qwen2_5_omni.code2wav.stream_kv import LayerKV

MIN_DOT_SIZE = 16
"""Triton multiplies tiles whose sides are powers of two from 16 on."""


class TritonDiTOps:
    """Implements `DiTOps` on CUDA."""

    def norm(self, hidden: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return _norm(hidden, None, None, scale, shift, dtype)

    def gated_norm(
        self,
        hidden: torch.Tensor,
        update: torch.Tensor,
        gate: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        return _norm(hidden, update, gate, scale, shift, dtype)

    def linear_gelu(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32:
            return F.gelu(F.linear(x, weight, bias), approximate="tanh")
        # PyTorch's door to cuBLASLt's epilogue, which applies GELU before the product is written.
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
            head_dim**-0.5,
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
            num_warps=1,  # thousands of programs: more warps each only wait for each other
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


def _norm(
    hidden: torch.Tensor,
    update: torch.Tensor | None,
    gate: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    num_rows, width = hidden.shape
    out = torch.empty(num_rows, width, dtype=dtype, device=hidden.device)
    _gated_norm[(num_rows,)](
        hidden,
        hidden if update is None else update,
        hidden if gate is None else gate,
        scale,
        shift,
        out,
        width,
        NORM_EPS,
        HAS_UPDATE=update is not None,
        TILE=triton.next_power_of_2(width),
        num_warps=4,
    )
    return out


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
def _load_rotated(
    qkv_ptr, first_row, column, row_stride, angles, rotary_stride, is_inside, is_turned,
    TILE: tl.constexpr, HALF_DIM: tl.constexpr,
):  # fmt: skip
    """Both halves of one head of queries or keys, turned by the rotary embedding; [TILE, HALF_DIM] each."""
    offsets = (first_row + tl.arange(0, TILE)[:, None]) * row_stride + column + tl.arange(0, HALF_DIM)[None, :]
    even = tl.load(qkv_ptr + offsets, mask=is_inside, other=0.0)
    odd = tl.load(qkv_ptr + offsets + HALF_DIM, mask=is_inside, other=0.0)
    cos = tl.load(angles, mask=is_turned, other=1.0)
    sin = tl.load(angles + rotary_stride, mask=is_turned, other=0.0)
    turned_even = even * cos - odd * sin
    turned_odd = odd * cos + even * sin
    return turned_even.to(even.dtype), turned_odd.to(even.dtype)


@triton.jit
def _attend(
    qkv_ptr, first_row, num_keys, key_column, value_column, row_stride, angles, rotary_stride, is_turned,
    q_even, q_odd, highest, total, attended, softmax_scale,
    TILE: tl.constexpr, HALF_DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes the first `num_keys` keys from `first_row` on into a running softmax."""
    rows = tl.arange(0, TILE)
    is_key = rows < num_keys
    k_even, k_odd = _load_rotated(
        qkv_ptr, first_row, key_column, row_stride, angles, rotary_stride, is_key[:, None],
        is_turned & is_key[:, None], TILE, HALF_DIM,
    )  # fmt: skip
    value_offsets = (first_row + rows[:, None]) * row_stride + value_column + tl.arange(0, 2 * HALF_DIM)[None, :]
    values = tl.load(qkv_ptr + value_offsets, mask=is_key[:, None], other=0.0)
    scores = tl.dot(q_even, tl.trans(k_even), input_precision=PRECISION)
    scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision=PRECISION) * softmax_scale
    scores = tl.where(is_key[None, :], scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp(scores - new_highest[:, None])
    kept = tl.exp(highest - new_highest)
    attended = tl.dot(weights.to(values.dtype), values, attended * kept[:, None], input_precision=PRECISION)
    return new_highest, total * kept + tl.sum(weights, 1), attended


@triton.jit
def _block_attention(
    qkv_ptr, out_ptr, rotary_ptr, rotary_stride, index_ptr, num_frames_ptr, has_previous_ptr, has_next_ptr,
    num_blocks, inner, softmax_scale, kept_ptr, slot_stride, interval_stride, interval_ptr, read_slot_ptr,
    BLOCK_SIZE: tl.constexpr, HALF_DIM: tl.constexpr, BACK: tl.constexpr, AHEAD: tl.constexpr,
    READS_SLOTS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program computes one head of one block: its queries against at most 3 * BLOCK_SIZE keys."""
    block, head = tl.program_id(0), tl.program_id(1)
    entry = block % num_blocks
    rows, columns = tl.arange(0, TILE), tl.arange(0, 2 * HALF_DIM)
    in_block = (rows < BLOCK_SIZE)[:, None]
    row_stride = 3 * inner
    column = head * 2 * HALF_DIM
    first_row = block * BLOCK_SIZE
    # Head 0 alone has the rotary embedding; elsewhere the angle is 0.
    is_turned = in_block & (head == 0)
    position = tl.load(index_ptr + entry) * BLOCK_SIZE
    angles = rotary_ptr + (position + rows[:, None]) * HALF_DIM + tl.arange(0, HALF_DIM)[None, :]
    q_even, q_odd = _load_rotated(
        qkv_ptr, first_row, column, row_stride, angles, rotary_stride, in_block, is_turned, TILE, HALF_DIM
    )
    highest = tl.full([TILE], -1e30, tl.float32)  # finite: the first rescaling must not be inf - inf
    total = tl.zeros([TILE], tl.float32)
    attended = tl.zeros([TILE, 2 * HALF_DIM], tl.float32)
    highest, total, attended = _attend(
        qkv_ptr, first_row, tl.load(num_frames_ptr + entry), column + inner, column + 2 * inner, row_stride,
        angles, rotary_stride, is_turned, q_even, q_odd, highest, total, attended, softmax_scale,
        TILE, HALF_DIM, PRECISION,
    )  # fmt: skip
    if BACK:
        exists = tl.load(has_previous_ptr + entry) != 0
        num_keys = tl.load(num_frames_ptr + entry - 1, mask=exists, other=0)
        highest, total, attended = _attend(
            qkv_ptr, first_row - BLOCK_SIZE, num_keys, column + inner, column + 2 * inner, row_stride,
            angles - BLOCK_SIZE * HALF_DIM, rotary_stride, is_turned, q_even, q_odd, highest, total, attended,
            softmax_scale, TILE, HALF_DIM, PRECISION,
        )  # fmt: skip
    if READS_SLOTS:
        slot = tl.load(read_slot_ptr + entry)
        if slot >= 0:  # then the neighbour before is of another window, and has added nothing
            block_ptr = kept_ptr + slot.to(tl.int64) * slot_stride + tl.load(interval_ptr) * interval_stride
            highest, total, attended = _attend(
                block_ptr, (block // num_blocks) * BLOCK_SIZE, BLOCK_SIZE, column, column + inner, 2 * inner,
                angles - BLOCK_SIZE * HALF_DIM, rotary_stride, is_turned, q_even, q_odd, highest, total, attended,
                softmax_scale, TILE, HALF_DIM, PRECISION,
            )  # fmt: skip
    if AHEAD:
        exists = tl.load(has_next_ptr + entry) != 0
        num_keys = tl.load(num_frames_ptr + entry + 1, mask=exists, other=0)
        highest, total, attended = _attend(
            qkv_ptr, first_row + BLOCK_SIZE, num_keys, column + inner, column + 2 * inner, row_stride,
            angles + BLOCK_SIZE * HALF_DIM, rotary_stride, is_turned, q_even, q_odd, highest, total, attended,
            softmax_scale, TILE, HALF_DIM, PRECISION,
        )  # fmt: skip
    attended = attended / total[:, None]
    out_offsets = (first_row + rows[:, None]) * inner + column + columns[None, :]
    tl.store(out_ptr + out_offsets, attended.to(out_ptr.dtype.element_ty), mask=in_block)


@triton.jit
def _keep_frame(
    qkv_ptr, kept_ptr, slot_stride, interval_stride, interval_ptr, kept_slot_ptr, num_blocks, inner,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program copies keys and values of one frame, if its block is to be kept."""
    block, frame = tl.program_id(0), tl.program_id(1)
    slot = tl.load(kept_slot_ptr + block % num_blocks)
    if slot >= 0:
        columns = tl.arange(0, TILE)
        inside = columns < 2 * inner
        values = tl.load(qkv_ptr + (block * BLOCK_SIZE + frame) * 3 * inner + inner + columns, mask=inside)
        block_ptr = kept_ptr + slot.to(tl.int64) * slot_stride + tl.load(interval_ptr) * interval_stride
        offset = ((block // num_blocks) * BLOCK_SIZE + frame) * 2 * inner
        tl.store(block_ptr + offset + columns, values, mask=inside)
