"""What a layer of the code predictor computes, in torch's operations. `decoder_kernels` does the same in
Triton.

`n` is the number of frames, `count` that of positions of each in one step, and rows are ordered by frame.
"""

import torch
from torch.nn import functional


class DecoderOperations:
    """Norms are those of `Qwen3OmniMoeRMSNorm`, which rounds before it applies the weight, unlike torch's and
    vLLM's."""

    def __init__(self, epsilon: float) -> None:
        self._epsilon = epsilon

    def linear(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The product `[rows, outputs]` of `hidden` `[rows, inputs]`, with `norm` `[inputs]` applied first,
        and `weight` `[outputs, inputs]`; plus `residual` `[rows, outputs]`."""
        product = functional.linear(hidden if norm is None else self._normed(hidden, norm), weight)
        return product if residual is None else residual + product

    def gated_linear(self, hidden: torch.Tensor, weight: torch.Tensor, *, norm: torch.Tensor) -> torch.Tensor:
        """SiLU of the first half of a product times its second half: `[rows, outputs]`, for `weight`
        `[2 * outputs, inputs]`."""
        gate, up = self.linear(hidden, weight, norm=norm).chunk(2, -1)
        return functional.silu(gate) * up

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
        """Attended values `[n * count, heads * head_dim]` of positions from `first`, for `qkv`
        `[n * count, (heads + 2 * kv_heads) * head_dim]`.

        `norms`, of queries and keys, are `[head_dim]`; `cos` and `sin` are `[length, head_dim]`. `cache`
        `[2, >= n, kv_heads, length, head_dim]` holds keys and values of the positions before `first` and
        takes the new ones."""
        kv_heads, _, head_dim = cache.shape[2:]
        n, end = len(qkv) // count, first + count
        heads = qkv.view(n, count, -1, head_dim).transpose(1, 2)
        queries, keys, values = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
        cos, sin = cos[first:end], sin[first:end]
        cache[0, :n, :, first:end] = _rotated(self._normed(keys, norms[1]), cos, sin)
        cache[1, :n, :, first:end] = values
        attended = functional.scaled_dot_product_attention(
            _rotated(self._normed(queries, norms[0]), cos, sin),
            cache[0, :n, :, :end],
            cache[1, :n, :, :end],
            is_causal=first == 0,
            enable_gqa=True,
        )
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon)
        return weight * normed.to(hidden.dtype)


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of `[..., count, head_dim]`."""
    lower, upper = heads.chunk(2, -1)
    return heads * cos + torch.cat((-upper, lower), -1) * sin
