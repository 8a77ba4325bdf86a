"""The transformer in front of the decoder (`Qwen3OmniMoeCode2WavTransformerModel`): attention over a sliding
window, RMSNorm and RoPE in float32."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavLayerScale,
    Qwen3OmniMoeCode2WavMlp,
    Qwen3OmniMoeCode2WavRMSNorm,
)

from stages.qwen_codec.code2wav.state import Step, Streamed


class Attention(Streamed):
    def __init__(self, config: Qwen3OmniMoeCode2WavConfig, head_dim: int) -> None:
        super().__init__()
        width, self._head_dim = config.hidden_size, head_dim
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._is_grouped = num_heads != num_kv_heads
        bias = config.attention_bias
        self.q_proj = nn.Linear(width, num_heads * self._head_dim, bias=bias)
        self.k_proj = nn.Linear(width, num_kv_heads * self._head_dim, bias=bias)
        self.v_proj = nn.Linear(width, num_kv_heads * self._head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * self._head_dim, width, bias=bias)
        self.state_shape = (2, num_kv_heads, config.sliding_window - 1, self._head_dim)

    def forward(self, x: torch.Tensor, sight: "Sight", step: Step) -> torch.Tensor:
        queries = sight.rotated(self._heads(self.q_proj(x)))
        keys, values = sight.rotated(self._heads(self.k_proj(x))), self._heads(self.v_proj(x))
        keys, values = step.extended_kv(self, torch.stack((keys, values), dim=1)).unbind(1)
        y = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=sight.is_visible, enable_gqa=self._is_grouped
        )
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[num_streams, length, heads * head_dim] to [num_streams, heads, length, head_dim]."""
        return x.unflatten(-1, (-1, self._head_dim)).transpose(1, 2)


class Sight:
    """Which frames the frames of a step see, and their rotary embeddings; the same in all layers."""

    def __init__(
        self,
        step: Step,
        length: int,
        config: Qwen3OmniMoeCode2WavConfig,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        device, num_past = step.slots.device, config.sliding_window - 1
        new = torch.arange(length, device=device)
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        speeds = 1.0 / config.rope_parameters["rope_theta"] ** exponents
        angles = (step.positions[:, None] + new).float()[..., None] * speeds
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        self._cos, self._sin = angles.cos().to(dtype), angles.sin().to(dtype)
        keys = torch.arange(num_past + length, device=device)
        ahead = keys - new[:, None]  # 0: the oldest frame in the window; num_past: the frame itself
        is_in_window = (ahead >= 0) & (ahead <= num_past)
        is_known = keys >= num_past - step.num_known[:, None]
        self.is_visible = is_in_window[None, None] & is_known[:, None, None]
        """bool [num_streams, 1, length, keys]."""

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_streams, heads, length, head_dim]."""
        first, second = x.chunk(2, dim=-1)
        return x * self._cos + torch.cat((-second, first), dim=-1) * self._sin


class TransformerLayer(nn.Module):
    def __init__(self, config: Qwen3OmniMoeCode2WavConfig, head_dim: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.input_layernorm = Qwen3OmniMoeCode2WavRMSNorm(width, config.rms_norm_eps)
        self.self_attn = Attention(config, head_dim)
        self.self_attn_layer_scale = Qwen3OmniMoeCode2WavLayerScale(config)
        self.post_attention_layernorm = Qwen3OmniMoeCode2WavRMSNorm(width, config.rms_norm_eps)
        self.mlp = Qwen3OmniMoeCode2WavMlp(config)
        self.mlp_layer_scale = Qwen3OmniMoeCode2WavLayerScale(config)

    def forward(self, x: torch.Tensor, sight: Sight, step: Step) -> torch.Tensor:
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), sight, step))
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))


class Transformer(nn.Module):
    def __init__(self, config: Qwen3OmniMoeCode2WavConfig, *, head_dim: int) -> None:
        super().__init__()
        self._config, self._head_dim = config, head_dim
        self.layers = nn.ModuleList(
            TransformerLayer(config, head_dim) for _ in range(config.num_hidden_layers)
        )
        self.norm = Qwen3OmniMoeCode2WavRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x: [num_streams, new frames, hidden_size], and so is the result."""
        sight = Sight(step, x.shape[1], self._config, self._head_dim, x.dtype)
        for layer in self.layers:
            x = layer(x, sight, step)
        return self.norm(x)
