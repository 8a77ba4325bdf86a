"""Attention of a decoding step in one kernel: rotary embedding, the new key and value into the cache, and attention.

vLLM takes five kernels for that, each of which waits for the one before it: of a small model's step that is a third.
A request's past is shared out among programs; the last of them to end merges what they found ("flash decoding"). The
new token is with the program that has the past's end, so none reads from the cache what another writes.
"""

import math

import torch
import triton
import triton.language as tl

MAX_REQUESTS = 64
"""Of one step; with more, attention by itself is what takes the time, and vLLM's kernel is the better one."""

_MIN_DOT = 16  # the tensor cores' narrowest tile


@triton.jit
def _decode(
    qkv_ptr,  # [R, (HEADS + 2 * KV_HEADS) * DIM]
    positions_ptr,  # [3, R]
    cos_sin_ptr,  # [positions, DIM]: cosines, then sines
    cache_ptr,  # [blocks, KV_HEADS, BLOCK, 2 * DIM], by strides: a key, then its value
    out_ptr,  # [R, HEADS * DIM]
    table_ptr,  # [R, blocks of a request]
    lengths_ptr,  # [R]: with the new token; 0 for padding
    slots_ptr,  # [R]: where in the cache the new token belongs; -1 for nowhere
    sums_ptr,
    weights_ptr,
    ended_ptr,
    scale,  # of a score, times log2(e)
    positions_stride,
    table_stride,
    cache_block_stride,
    cache_head_stride,
    cache_token_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    TIME_SECTION: tl.constexpr,
    HEIGHT_SECTION: tl.constexpr,
):
    request, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    HALF: tl.constexpr = DIM // 2
    QUERIES: tl.constexpr = HEADS // KV_HEADS
    length = tl.load(lengths_ptr + request)
    past = length - 1
    num_tiles = tl.cdiv(past, TILE)
    share = tl.maximum(tl.cdiv(num_tiles, PARTS), 1)
    num_parts = tl.maximum(tl.cdiv(num_tiles, share), 1)  # that have something to do
    if (length > 0) & (part < num_parts):
        i = tl.arange(0, HALF)
        d = tl.arange(0, DIM)
        g = tl.arange(0, GROUP)
        is_query = g < QUERIES
        # Each frequency turns by the position in time, height or width (`mrope_section`).
        axis = tl.where(i < TIME_SECTION, 0, tl.where(i < TIME_SECTION + HEIGHT_SECTION, 1, 2))
        position = tl.load(positions_ptr + axis * positions_stride + request)
        cos = tl.load(cos_sin_ptr + position * DIM + i).to(tl.float32)
        sin = tl.load(cos_sin_ptr + position * DIM + HALF + i).to(tl.float32)

        row = qkv_ptr + request.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM)
        q = row + (kv_head * QUERIES + g)[:, None] * DIM + i[None, :]
        q1 = tl.load(q, mask=is_query[:, None], other=0.0).to(tl.float32)
        q2 = tl.load(q + HALF, mask=is_query[:, None], other=0.0).to(tl.float32)
        dtype = qkv_ptr.dtype.element_ty
        turned1 = (q1 * cos[None, :] - q2 * sin[None, :]).to(dtype)
        turned2 = (q2 * cos[None, :] + q1 * sin[None, :]).to(dtype)

        best = tl.full([GROUP], float("-inf"), tl.float32)
        weight = tl.zeros([GROUP], tl.float32)
        total = tl.zeros([GROUP, DIM], tl.float32)
        for tile in range(part * share, tl.minimum((part + 1) * share, num_tiles)):
            t = tile * TILE + tl.arange(0, TILE)
            is_past = t < past
            block = tl.load(table_ptr + request * table_stride + t // BLOCK, mask=is_past, other=0).to(tl.int64)
            at = cache_ptr + block * cache_block_stride + (t % BLOCK) * cache_token_stride + kv_head * cache_head_stride
            k1 = tl.load(at[None, :] + i[:, None], mask=is_past[None, :], other=0.0)
            k2 = tl.load(at[None, :] + HALF + i[:, None], mask=is_past[None, :], other=0.0)
            v = tl.load(at[:, None] + DIM + d[None, :], mask=is_past[:, None], other=0.0)
            score = tl.dot(turned1, k1, input_precision="ieee")
            score = tl.dot(turned2, k2, score, input_precision="ieee") * scale
            score = tl.where(is_past[None, :], score, float("-inf"))
            above = tl.maximum(best, tl.max(score, 1))
            p = tl.exp2(score - above[:, None])
            fade = tl.exp2(best - above)
            weight = weight * fade + tl.sum(p, 1)
            total = tl.dot(p.to(dtype), v, total * fade[:, None], input_precision="ieee")
            best = above

        if part == num_parts - 1:  # the new token
            key = row + (HEADS + kv_head) * DIM + i
            new1, new2 = tl.load(key).to(tl.float32), tl.load(key + HALF).to(tl.float32)
            new_k1, new_k2 = (new1 * cos - new2 * sin).to(dtype), (new2 * cos + new1 * sin).to(dtype)
            new_v = tl.load(row + (HEADS + KV_HEADS + kv_head) * DIM + d)
            slot = tl.load(slots_ptr + request)
            if slot >= 0:
                place = (
                    cache_ptr
                    + (slot // BLOCK) * cache_block_stride
                    + (slot % BLOCK) * cache_token_stride
                    + kv_head * cache_head_stride
                )
                tl.store(place + i, new_k1)
                tl.store(place + HALF + i, new_k2)
                tl.store(place + DIM + d, new_v)
            own = tl.sum(turned1.to(tl.float32) * new_k1.to(tl.float32)[None, :], 1)
            own = (own + tl.sum(turned2.to(tl.float32) * new_k2.to(tl.float32)[None, :], 1)) * scale
            highest = tl.maximum(best, own)
            gain, loss = tl.exp2(own - highest), tl.exp2(best - highest)
            weight = weight * loss + gain
            total = total * loss[:, None] + gain[:, None] * new_v.to(tl.float32)[None, :]
            best = highest

        out = out_ptr + request.to(tl.int64) * (HEADS * DIM) + (kv_head * QUERIES + g)[:, None] * DIM + d[None, :]
        is_out = is_query[:, None] & (d < DIM)[None, :]
        is_last = num_parts == 1
        first = (request * KV_HEADS + kv_head) * PARTS
        if num_parts > 1:
            # Past the first-level cache: another multiprocessor reads them.
            mine = first + part
            tl.store(sums_ptr + (mine * GROUP + g)[:, None] * DIM + d[None, :], total, cache_modifier=".cg")
            tl.store(weights_ptr + mine * (2 * GROUP) + g, best, cache_modifier=".cg")
            tl.store(weights_ptr + mine * (2 * GROUP) + GROUP + g, weight, cache_modifier=".cg")
            tl.debug_barrier()  # all threads have written before one of them counts the part
            ended = ended_ptr + request * KV_HEADS + kv_head
            is_last = tl.atomic_add(ended, 1, sem="acq_rel") == num_parts - 1
            if is_last:
                tl.store(ended, 0)  # as the next step wants it
                best = tl.full([GROUP], float("-inf"), tl.float32)
                weight = tl.zeros([GROUP], tl.float32)
                total = tl.zeros([GROUP, DIM], tl.float32)
                for other in range(first, first + num_parts):
                    found = tl.load(sums_ptr + (other * GROUP + g)[:, None] * DIM + d[None, :], cache_modifier=".cg")
                    found_best = tl.load(weights_ptr + other * (2 * GROUP) + g, cache_modifier=".cg")
                    found_weight = tl.load(weights_ptr + other * (2 * GROUP) + GROUP + g, cache_modifier=".cg")
                    merged_best = tl.maximum(best, found_best)
                    kept, added = tl.exp2(best - merged_best), tl.exp2(found_best - merged_best)
                    weight = weight * kept + found_weight * added
                    total = total * kept[:, None] + found * added[:, None]
                    best = merged_best
        if is_last:
            tl.store(out, (total / weight[:, None]).to(out_ptr.dtype.element_ty), mask=is_out)


class DecodeAttention:
    """The kernel with its scratch memory, which one step's layers use one after the other."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mrope_section: tuple[int, int, int],
        device: torch.device,
    ) -> None:
        """`mrope_section`: how many of the head_dim / 2 frequencies turn by time, height and width."""
        if num_heads % num_kv_heads or head_dim & (head_dim - 1) or head_dim < 2 * _MIN_DOT:
            raise ValueError(f"no kernel for {num_heads} heads, {num_kv_heads} of keys, of {head_dim}")
        if sum(mrope_section) != head_dim // 2:
            raise ValueError(f"mrope_section {mrope_section} is not of head_dim {head_dim}")
        self._heads = (num_heads, num_kv_heads, head_dim)
        self._sections = mrope_section
        self._group = max(_MIN_DOT, triton.next_power_of_2(num_heads // num_kv_heads))
        places = max(rows * _shares(rows)[0] for rows in range(1, MAX_REQUESTS + 1)) * num_kv_heads
        self._sums = torch.empty(places, self._group, head_dim, dtype=torch.float32, device=device)
        self._weights = torch.empty(places, 2, self._group, dtype=torch.float32, device=device)
        self._ended = torch.zeros(MAX_REQUESTS * num_kv_heads, dtype=torch.int32, device=device)

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
        """Write attention's result for the new token of each of R requests into `out` `[R, heads * dim]`, and its key
        and value into `cache`.

        `qkv` `[R, (heads + 2 * kv_heads) * dim]`; `positions` `[3, R]`; `cos_sin` `[positions, dim]`, cosines before
        sines; `cache` `[blocks, kv_heads, tokens of a block, 2 * dim]` of qkv's dtype, a key before its value, last
        dimension contiguous; `block_table` int32 `[>= R, blocks of a request]`; `lengths` int32 `[>= R]` with the new
        token, 0 for a row to leave alone; `slots` int64 `[>= R]`, block * tokens of a block + place, or -1 to keep the
        token out of the cache. At most `MAX_REQUESTS` rows."""
        num_heads, num_kv_heads, head_dim = self._heads
        num_rows = qkv.shape[0]
        parts, tile = _shares(num_rows)
        tile = tile if qkv.element_size() == 2 else 32  # as many bytes of shared memory
        _decode[(num_rows, num_kv_heads, parts)](
            qkv,
            positions,
            cos_sin,
            cache,
            out,
            block_table,
            lengths,
            slots,
            self._sums,
            self._weights,
            self._ended,
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
            PARTS=parts,
            TILE=tile,
            GROUP=self._group,
            TIME_SECTION=self._sections[0],
            HEIGHT_SECTION=self._sections[1],
            num_warps=4,
            num_stages=2,
        )


def _shares(num_rows: int) -> tuple[int, int]:
    """Programs to share out a request's past, and tokens of a tile; the best on an H200 at 350 to 1500 tokens."""
    return (16, 128) if num_rows <= 16 else (4, 64)
