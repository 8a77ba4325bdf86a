"""Triton kernels for decode attention, and for the rotary embedding in other steps.

`DecodeAttention` fuses into one kernel what takes vLLM five: rotary embedding, writing the new key and value
to the cache, and attention. Each of the five waits for the previous one, which costs a small model a third of
a step. A request's past is split among programs, and the last one to finish merges their partial results
("flash decoding"). The program with the end of the past also handles the new token, so no program reads from
the cache what another writes.

`RopeInPlace` applies the multimodal rotary embedding to queries and keys in place. vLLM's version looks up
each token's cosines first, in every layer, which takes an extra kernel, and its launches cost the host more:
a third in steps with prompts, whose attention is not part of a CUDA graph.
"""

import math

import torch
import triton
import triton.language as tl

from stages.runtime.kernel_launch import CachedLaunch

MAX_REQUESTS = 64
"""Per step. With more, attention itself dominates and vLLM's kernel is faster."""

_MIN_DOT = 16  # narrowest tile of the tensor cores


@triton.jit
def _decode_attention(
    qkv_ptr,  # [R, (HEADS + 2 * KV_HEADS) * DIM]
    positions_ptr,  # [3, R]
    cos_sin_ptr,  # [positions, DIM]: cosines, then sines
    cache_ptr,  # [blocks, KV_HEADS, BLOCK, 2 * DIM], by strides: a key, then its value
    out_ptr,  # [R, HEADS * DIM]
    table_ptr,  # [R, blocks of a request]
    lengths_ptr,  # [R]: includes the new token; 0 for padding
    slots_ptr,  # [R]: the new token's slot in the cache, or -1 for none
    partial_acc_ptr,  # [R, KV_HEADS, NUM_SPLITS, GROUP, DIM] float32: weighted sums per split
    partial_ml_ptr,  # [R, KV_HEADS, NUM_SPLITS, 2, GROUP] float32: maximum score and sum of weights per split
    num_done_ptr,  # [R, KV_HEADS] int32: number of finished splits; 0 before and after
    scale,  # score scale times log2(e)
    positions_stride,
    table_stride,
    cache_block_stride,
    cache_head_stride,
    cache_token_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    TIME_SECTION: tl.constexpr,
    HEIGHT_SECTION: tl.constexpr,
):
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    HALF: tl.constexpr = DIM // 2
    QUERIES: tl.constexpr = HEADS // KV_HEADS
    length = tl.load(lengths_ptr + request)
    past = length - 1
    num_tiles = tl.cdiv(past, TILE)
    tiles_per_split = tl.maximum(tl.cdiv(num_tiles, NUM_SPLITS), 1)
    num_splits = tl.maximum(tl.cdiv(num_tiles, tiles_per_split), 1)  # splits that have work
    if (length > 0) & (split < num_splits):
        i = tl.arange(0, HALF)
        d = tl.arange(0, DIM)
        g = tl.arange(0, GROUP)
        is_query = g < QUERIES
        # Each frequency rotates by the position in time, height or width (`mrope_section`).
        axis = tl.where(i < TIME_SECTION, 0, tl.where(i < TIME_SECTION + HEIGHT_SECTION, 1, 2))
        position = tl.load(positions_ptr + axis * positions_stride + request)
        cos = tl.load(cos_sin_ptr + position * DIM + i).to(tl.float32)
        sin = tl.load(cos_sin_ptr + position * DIM + HALF + i).to(tl.float32)

        row = qkv_ptr + request.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM)
        q = row + (kv_head * QUERIES + g)[:, None] * DIM + i[None, :]
        q1 = tl.load(q, mask=is_query[:, None], other=0.0).to(tl.float32)
        q2 = tl.load(q + HALF, mask=is_query[:, None], other=0.0).to(tl.float32)
        dtype = qkv_ptr.dtype.element_ty
        q1_rot = (q1 * cos[None, :] - q2 * sin[None, :]).to(dtype)
        q2_rot = (q2 * cos[None, :] + q1 * sin[None, :]).to(dtype)

        m_i = tl.full([GROUP], float("-inf"), tl.float32)
        l_i = tl.zeros([GROUP], tl.float32)
        acc = tl.zeros([GROUP, DIM], tl.float32)
        for tile in range(split * tiles_per_split, tl.minimum((split + 1) * tiles_per_split, num_tiles)):
            t = tile * TILE + tl.arange(0, TILE)
            is_past = t < past
            block = tl.load(table_ptr + request * table_stride + t // BLOCK, mask=is_past, other=0).to(
                tl.int64
            )
            at = (
                cache_ptr
                + block * cache_block_stride
                + (t % BLOCK) * cache_token_stride
                + kv_head * cache_head_stride
            )
            k1 = tl.load(at[None, :] + i[:, None], mask=is_past[None, :], other=0.0)
            k2 = tl.load(at[None, :] + HALF + i[:, None], mask=is_past[None, :], other=0.0)
            v = tl.load(at[:, None] + DIM + d[None, :], mask=is_past[:, None], other=0.0)
            score = tl.dot(q1_rot, k1, input_precision="ieee")
            score = tl.dot(q2_rot, k2, score, input_precision="ieee") * scale
            score = tl.where(is_past[None, :], score, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(score, 1))
            p = tl.exp2(score - m_new[:, None])
            alpha = tl.exp2(m_i - m_new)
            l_i = l_i * alpha + tl.sum(p, 1)
            acc = tl.dot(p.to(dtype), v, acc * alpha[:, None], input_precision="ieee")
            m_i = m_new

        if split == num_splits - 1:  # the new token
            key = row + (HEADS + kv_head) * DIM + i
            new1, new2 = tl.load(key).to(tl.float32), tl.load(key + HALF).to(tl.float32)
            new_k1, new_k2 = (new1 * cos - new2 * sin).to(dtype), (new2 * cos + new1 * sin).to(dtype)
            new_v = tl.load(row + (HEADS + KV_HEADS + kv_head) * DIM + d)
            slot = tl.load(slots_ptr + request)
            if slot >= 0:
                new_at = (
                    cache_ptr
                    + (slot // BLOCK) * cache_block_stride
                    + (slot % BLOCK) * cache_token_stride
                    + kv_head * cache_head_stride
                )
                tl.store(new_at + i, new_k1)
                tl.store(new_at + HALF + i, new_k2)
                tl.store(new_at + DIM + d, new_v)
            score_new = tl.sum(q1_rot.to(tl.float32) * new_k1.to(tl.float32)[None, :], 1)
            score_new = (
                score_new + tl.sum(q2_rot.to(tl.float32) * new_k2.to(tl.float32)[None, :], 1)
            ) * scale
            m_new = tl.maximum(m_i, score_new)
            p_new, alpha = tl.exp2(score_new - m_new), tl.exp2(m_i - m_new)
            l_i = l_i * alpha + p_new
            acc = acc * alpha[:, None] + p_new[:, None] * new_v.to(tl.float32)[None, :]
            m_i = m_new

        out = (
            out_ptr
            + request.to(tl.int64) * (HEADS * DIM)
            + (kv_head * QUERIES + g)[:, None] * DIM
            + d[None, :]
        )
        is_out = is_query[:, None] & (d < DIM)[None, :]
        is_last = num_splits == 1
        first = (request * KV_HEADS + kv_head) * NUM_SPLITS
        if num_splits > 1:
            # Bypass the L1 cache: another multiprocessor reads these.
            own = first + split
            tl.store(
                partial_acc_ptr + (own * GROUP + g)[:, None] * DIM + d[None, :], acc, cache_modifier=".cg"
            )
            tl.store(partial_ml_ptr + own * (2 * GROUP) + g, m_i, cache_modifier=".cg")
            tl.store(partial_ml_ptr + own * (2 * GROUP) + GROUP + g, l_i, cache_modifier=".cg")
            tl.debug_barrier()  # all threads must have written before one of them counts the split
            counter = num_done_ptr + request * KV_HEADS + kv_head
            is_last = tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1
            if is_last:
                tl.store(counter, 0)  # reset for the next step
                m_i = tl.full([GROUP], float("-inf"), tl.float32)
                l_i = tl.zeros([GROUP], tl.float32)
                acc = tl.zeros([GROUP, DIM], tl.float32)
                for other in range(first, first + num_splits):
                    other_acc = tl.load(
                        partial_acc_ptr + (other * GROUP + g)[:, None] * DIM + d[None, :],
                        cache_modifier=".cg",
                    )
                    other_m = tl.load(partial_ml_ptr + other * (2 * GROUP) + g, cache_modifier=".cg")
                    other_l = tl.load(partial_ml_ptr + other * (2 * GROUP) + GROUP + g, cache_modifier=".cg")
                    m_new = tl.maximum(m_i, other_m)
                    alpha, beta = tl.exp2(m_i - m_new), tl.exp2(other_m - m_new)
                    l_i = l_i * alpha + other_l * beta
                    acc = acc * alpha[:, None] + other_acc * beta[:, None]
                    m_i = m_new
        if is_last:
            tl.store(out, (acc / l_i[:, None]).to(out_ptr.dtype.element_ty), mask=is_out)


class DecodeAttention:
    """The kernel with its scratch memory, which a step's layers share one after another."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mrope_section: tuple[int, int, int],
        device: torch.device,
    ) -> None:
        """`mrope_section`: number of the head_dim / 2 frequencies that rotate by time, height and width."""
        self._heads = (num_heads, num_kv_heads, head_dim)
        self._sections = mrope_section
        self._group = max(_MIN_DOT, triton.next_power_of_2(num_heads // num_kv_heads))
        places = max(rows * _splits(rows)[0] for rows in range(1, MAX_REQUESTS + 1)) * num_kv_heads
        self._partial_acc = torch.empty(places, self._group, head_dim, dtype=torch.float32, device=device)
        self._partial_ml = torch.empty(places, 2, self._group, dtype=torch.float32, device=device)
        self._num_done = torch.zeros(MAX_REQUESTS * num_kv_heads, dtype=torch.int32, device=device)

    def __call__(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write the attention output for the new token of each of R requests to `out` `[R, heads * dim]`, and
        its key and value to `cache`.

        `qkv` `[R, (heads + 2 * kv_heads) * dim]`; `positions` `[3, R]`; `cos_sin` `[positions, dim]`, cosines
        before sines; `cache` `[blocks, kv_heads, tokens per block, 2 * dim]`, qkv's dtype, each key before
        its value, last dimension contiguous; `block_table` int32 `[>= R, blocks per request]`; `lengths`
        int32 `[>= R]`, including the new token, 0 to skip a row; `slots` int64 `[>= R]`, block * tokens per
        block + offset, or -1 to keep the token out of the cache. Accepts at most `MAX_REQUESTS` rows."""
        num_heads, num_kv_heads, head_dim = self._heads
        num_rows = qkv.shape[0]
        num_splits, tile = _splits(num_rows)
        tile = tile if qkv.element_size() == 2 else 32  # float32: no more bytes of shared memory
        _decode_attention[(num_rows, num_kv_heads, num_splits)](
            qkv,
            positions,
            cos_sin,
            cache,
            out,
            block_table,
            lengths,
            slots,
            self._partial_acc,
            self._partial_ml,
            self._num_done,
            math.log2(math.e) / math.sqrt(head_dim),
            positions.stride(0),
            block_table.stride(0),
            cache.stride(0),
            cache.stride(1),
            cache.stride(2),
            HEADS=num_heads,
            KV_HEADS=num_kv_heads,
            DIM=head_dim,
            BLOCK=cache.shape[2],
            NUM_SPLITS=num_splits,
            TILE=tile,
            GROUP=self._group,
            TIME_SECTION=self._sections[0],
            HEIGHT_SECTION=self._sections[1],
            num_warps=4,
            num_stages=2,
        )


def _splits(num_rows: int) -> tuple[int, int]:
    """Number of programs that share a request's past, and tokens per tile. Fastest on an H200 at 350 to
    1500 tokens."""
    return (16, 128) if num_rows <= 16 else (4, 64)


@triton.jit
def _rotate(
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
    is_rotated = (head < HEADS)[:, None] & (i < HALF)[None, :]
    x1 = tl.load(first, mask=is_rotated, other=0.0).to(tl.float32)
    x2 = tl.load(first + HALF, mask=is_rotated, other=0.0).to(tl.float32)
    dtype = qkv_ptr.dtype.element_ty
    tl.store(first, (x1 * cos - x2 * sin).to(dtype), mask=is_rotated)
    tl.store(first + HALF, (x2 * cos + x1 * sin).to(dtype), mask=is_rotated)


class RopeInPlace:
    """The rotary kernel for one model's heads."""

    def __init__(self, num_heads: int, head_dim: int, mrope_section: tuple[int, int, int]) -> None:
        """`num_heads`: query heads plus key heads, contiguous in memory. `mrope_section`: number of the
        head_dim / 2 frequencies that rotate by time, height and width."""
        time, height, _ = mrope_section
        self._constants = (num_heads, head_dim, 1 << (num_heads - 1).bit_length(), time, height)
        self._launch = CachedLaunch(_rotate)

    def __call__(self, qkv: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
        """Rotate the first heads of each row of `qkv` `[n, >= num_heads * head_dim]`. `positions` `[3, n]`;
        `cos_sin` `[positions, head_dim]`, cosines before sines. The last dimensions are contiguous."""
        self._launch(
            (qkv.shape[0], 1, 1),
            qkv,
            positions,
            cos_sin,
            qkv.stride(0),
            positions.stride(0),
            *self._constants,
        )
