"""The operations of the DiT that are not matrix products, in plain PyTorch.

`TorchDiTOps` runs anywhere and is the reference for the fused CUDA kernels in `dit_kernels`.
"""

import torch
import torch.nn.functional as F

from stages.qwen2_5_omni.code2wav.packing import BlockLayout
from stages.qwen2_5_omni.code2wav.stream_kv import LayerKV

NORM_EPS = 1e-6
"""Epsilon of the DiT's layer norms (`Qwen2_5_OmniAdaLayerNormZero`, `DiTDecoderLayer`)."""


class TorchDiTOps:
    """Rows are frames: those of all conditional blocks, then the same ones unconditional."""

    def norm(
        self,
        hidden: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        dtype: torch.dtype,
        gated: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Layer norm of `hidden` (float32 [rows, width]) without weights, times 1 + scale, plus shift, as
        `dtype`. First adds the product of `gated`, a gate and an update, to `hidden` in place."""
        if gated is not None:
            gate, update = gated
            hidden.add_(gate * update.to(hidden.dtype))
        normed = F.layer_norm(hidden, (hidden.shape[-1],), eps=NORM_EPS)
        return (normed * (1 + scale) + shift).to(dtype)

    def linear_gelu(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """A linear layer followed by tanh-approximated GELU."""
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")

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
        """Attention within blocks, [rows, num_heads * head_dim].

        qkv: [rows, 3 * num_heads * head_dim], even before odd components in each query and key head; rotary:
        float32 [2, positions, head_dim / 2], cosine and sine, for head 0 only. With `back` (`ahead`), a block
        also attends to the previous (next) block, if it is in the same window; or, with `back` and `kept`, to
        the previous block in its `read_slot`.
        """
        num_rows, inner = qkv.shape[0], qkv.shape[1] // 3
        block_size = layout.block_size
        # [branches, blocks, frames, 3, heads, head_dim]
        parts = qkv.view(-1, layout.num_blocks, block_size, 3, inner // head_dim, head_dim)
        positions = layout.index[:, None] * block_size + torch.arange(block_size, device=qkv.device)
        cos, sin = rotary[:, positions].to(qkv.dtype)
        query, key, value = parts.unbind(3)
        query, key = _rotate_first_head(query, cos, sin), _rotate_first_head(key, cos, sin)
        # [blocks, frames]
        is_valid = torch.arange(block_size, device=qkv.device) < layout.num_frames[:, None]
        keys, values, masks = [key], [value], [is_valid]
        for wanted, shift, exists in ((back, 1, layout.has_previous), (ahead, -1, layout.has_next)):
            if wanted:
                keys.append(key.roll(shift, 1))
                values.append(value.roll(shift, 1))
                masks.append(is_valid.roll(shift, 0) & exists[:, None].bool())
        if back and kept is not None:
            reads = layout.read_slot >= 0
            slots = layout.read_slot.clamp(min=0).long()
            # [branches, blocks, frames, ...]
            kept_parts = kept.values[slots, kept.interval.long()].transpose(0, 1)
            kept_key, kept_value = kept_parts.unflatten(-1, (2, inner // head_dim, head_dim)).unbind(3)
            cos, sin = rotary[:, (positions - block_size).clamp(min=0)].to(qkv.dtype)
            is_read = reads[:, None, None, None]
            keys[1] = torch.where(is_read, _rotate_first_head(kept_key, cos, sin), keys[1])
            values[1] = torch.where(is_read, kept_value, values[1])
            masks[1] = masks[1] | reads[:, None]  # a kept block is complete
        attended = F.scaled_dot_product_attention(
            query.transpose(2, 3),
            torch.cat(keys, 2).transpose(2, 3),
            torch.cat(values, 2).transpose(2, 3),
            attn_mask=torch.cat(masks, 1)[:, None, None],
        )
        return attended.transpose(2, 3).reshape(num_rows, inner)

    def keep(self, qkv: torch.Tensor, layout: BlockLayout, kept: LayerKV) -> None:
        """Write the keys and values of blocks with a `kept_slot` into it."""
        inner = qkv.shape[1] // 3
        (blocks,) = (layout.kept_slot >= 0).nonzero(as_tuple=True)
        rows = qkv.view(-1, layout.num_blocks, layout.block_size, 3 * inner)[:, blocks, :, inner:]
        kept.values[layout.kept_slot[blocks].long(), kept.interval.long()] = rows.transpose(0, 1)


def _rotate_first_head(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`apply_rotary_pos_emb` on head 0 alone, as the model was trained; x: [..., heads, head_dim]."""
    even, odd = x[..., 0, :].chunk(2, -1)
    first = torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)
    return torch.cat([first[..., None, :], x[..., 1:, :]], -2)
