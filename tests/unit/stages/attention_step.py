"""A decoding step's attention, and what the reference makes of it."""

from dataclasses import dataclass

import torch

from stages.runtime.attention_kernels import DecodeAttention

BLOCK = 16
NUM_POSITIONS = 500


@dataclass(frozen=True)
class Sizes:
    heads: int
    kv_heads: int
    dim: int
    sections: tuple[int, int, int]

    def kernel(self, device: str) -> DecodeAttention:
        return DecodeAttention(self.heads, self.kv_heads, self.dim, self.sections, torch.device(device))


class Step:
    """Requests of these lengths, new token included, in a cache whose blocks lie in any order."""

    def __init__(
        self,
        sizes: Sizes,
        lengths: list[int],
        *,
        heads_first: bool = False,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(sum(lengths))
        self.sizes = sizes
        rows, blocks = len(lengths), max(1, max(-(-length // BLOCK) for length in lengths))
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.qkv = torch.randn(rows, (sizes.heads + 2 * sizes.kv_heads) * sizes.dim)
        # Parts of larger buffers, as a model runner's are.
        self.positions = torch.randint(0, NUM_POSITIONS, (3, rows + 5))
        num_blocks = rows * blocks + 1
        if heads_first:
            self.cache = torch.randn(num_blocks, sizes.kv_heads, BLOCK, 2 * sizes.dim)
        else:
            self.cache = torch.randn(num_blocks, BLOCK, sizes.kv_heads, 2 * sizes.dim).transpose(1, 2)
        self.table = (torch.randperm(num_blocks - 1)[: rows * blocks] + 1).reshape(rows, blocks).int()
        last = (self.lengths - 1).clamp(min=0)
        block = self.table.gather(1, (last // BLOCK)[:, None].long())[:, 0].long()
        self.slots = torch.where(self.lengths > 0, block * BLOCK + last % BLOCK, -1)
        self.out = torch.full((rows, sizes.heads * sizes.dim), 7.0)
        frequencies = 10000.0 ** (-torch.arange(0, sizes.dim, 2) / sizes.dim)
        angles = torch.arange(NUM_POSITIONS)[:, None] * frequencies
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
        for name in ("qkv", "cache", "out", "cos_sin"):
            setattr(self, name, getattr(self, name).to(device, dtype))
        for name in ("lengths", "positions", "table", "slots"):
            setattr(self, name, getattr(self, name).to(device))
        self.positions = self.positions[:, :rows]

    def run(self, attention: DecodeAttention) -> None:
        attention(
            self.qkv, self.positions, self.cos_sin, self.cache, self.table, self.lengths, self.slots, self.out
        )

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What is to be in `out` and `cache` after a run, computed in float64."""
        sizes = self.sizes
        q, k, v = self.qkv.double().split(
            [n * sizes.dim for n in (sizes.heads, sizes.kv_heads, sizes.kv_heads)], 1
        )
        rows = len(self.lengths)
        q = self._turned(q.view(rows, sizes.heads, sizes.dim))
        k = self._turned(k.view(rows, sizes.kv_heads, sizes.dim))
        cache, out = self.cache.double(), self.out.double()
        for row, length in enumerate(self.lengths.tolist()):
            if length == 0:
                continue
            if self.slots[row] >= 0:
                block, place = divmod(int(self.slots[row]), BLOCK)
                cache[block, :, place] = torch.cat([k[row], v[row].view(sizes.kv_heads, sizes.dim)], 1)
            held = cache[self.table[row].long()].transpose(1, 2)
            held = held.reshape(-1, sizes.kv_heads, 2 * sizes.dim)[: length - 1]
            keys = torch.cat([held[..., : sizes.dim], k[row][None]])
            values = torch.cat([held[..., sizes.dim :], v[row].view(1, sizes.kv_heads, sizes.dim)])
            keys, values = (x.repeat_interleave(sizes.heads // sizes.kv_heads, 1) for x in (keys, values))
            scores = torch.einsum("hd,thd->ht", q[row], keys) / sizes.dim**0.5
            out[row] = torch.einsum("ht,thd->hd", scores.softmax(1), values).flatten()
        return out, cache

    def turned_qkv(self) -> torch.Tensor:
        """`qkv` with the rotary embedding of queries and keys, computed in float64."""
        sizes, rows = self.sizes, len(self.qkv)
        num_turned = (sizes.heads + sizes.kv_heads) * sizes.dim
        turned, rest = self.qkv.double().split([num_turned, self.qkv.shape[1] - num_turned], 1)
        return torch.cat([self._turned(turned.view(rows, -1, sizes.dim)).flatten(1), rest], 1)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """Multimodal rotary embedding, as the reference's: x `[rows, heads, dim]`."""
        half = self.sizes.dim // 2
        sections = torch.tensor(self.sizes.sections, device=x.device)
        axis = torch.repeat_interleave(torch.arange(3, device=x.device), sections)
        at = self.positions[axis].T  # [rows, half]
        columns = torch.arange(half, device=x.device)
        cos, sin = (
            torch.cat([table[at, columns].double()] * 2, 1)[:, None] for table in self.cos_sin.split(half, 1)
        )
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
