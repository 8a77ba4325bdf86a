"""Rotary embedding whose cosines and sines are computed once per step, of packed M-RoPE positions.

vLLM's M-RoPE looks them up in a table of whole positions, in each layer and for each axis. Here, each token
of the step has one row of a table instead, in which each frequency has its axis already. All layers rotate
by it as without M-RoPE.
"""

import torch
from torch import nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding, apply_interleaved_rope
from vllm.model_executor.models.qwen3_moe import Qwen3MoeAttention

from omni_server.errors import ConfigError
from stages.runtime.fractional_positions import unpacked


class StepRotaryEmbedding(RotaryEmbedding):
    """`positions` of its `forward` are the rows that `begin_step` returned."""

    def __init__(self, rope: MRotaryEmbedding, max_num_tokens: int) -> None:
        """Takes the place of `rope`. Interleaves the axes whatever the config says, as the reference does.

        Raises `ConfigError` if the frequencies are scaled.
        """
        if rope.scaling_factor is not None:
            raise ConfigError("rope_parameters: scaled frequencies are not supported")
        super().__init__(
            rope.head_size, rope.rotary_dim, max_num_tokens, rope.base, rope.is_neox_style, rope.dtype
        )
        axes = torch.arange(3)[:, None].expand(3, rope.rotary_dim // 2)
        self.register_buffer("_axes", apply_interleaved_rope(axes, rope.mrope_section), persistent=False)
        self.register_buffer("_frequencies", self._compute_inv_freq(rope.base), persistent=False)
        # A graph expects its inputs where they were when it was recorded.
        self.register_buffer("_rows", torch.arange(max_num_tokens), persistent=False)

    def begin_step(self, positions: torch.Tensor) -> torch.Tensor:
        """Packed positions `[3, num_tokens]` to the rows of the step's tokens, `[num_tokens]`."""
        num_tokens = positions.shape[1]
        angles = unpacked(positions).T[:, self._axes] * self._frequencies
        cosines, sines = self.cos_sin_cache[:num_tokens].chunk(2, 1)
        torch.cos(angles, out=cosines)
        torch.sin(angles, out=sines)
        return self._rows[:num_tokens]


def use_step_rotary(model: nn.Module, max_num_tokens: int) -> StepRotaryEmbedding:
    """Changes the layers of a decoder with interleaved M-RoPE. A step has at most `max_num_tokens`."""
    attentions = [module for module in model.modules() if isinstance(module, Qwen3MoeAttention)]
    rotary = StepRotaryEmbedding(attentions[0].rotary_emb, max_num_tokens)
    for attention in attentions:
        attention.rotary_emb = rotary
    return rotary
