"""The talker's code predictor: 15 further codes for each codec token, one after the other.

A small dense decoder whose sequence is one frame. Reference:
`Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration` in transformers. Here, shapes and addresses are
the same for each frame of a batch size, and the host decides nothing by a value on the device, so that one
CUDA graph can hold all steps of a frame.
"""

import torch
from torch import nn
from torch.nn import functional
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorConfig,
)

from stages.runtime.code_sampling import Choose, CodeSampling

CODE_SAMPLING = CodeSampling(temperature=1.0, top_k=50, top_p=0.8)
"""Unless the stage config says otherwise. Literals in
`Qwen3OmniMoeTalkerForConditionalGeneration.prepare_inputs_for_generation`; the temperature is the default of
`generate`."""


class CodePredictor(nn.Module):
    """Parameters are named as in the checkpoint, below `talker.code_predictor`."""

    cache: torch.Tensor  # keys and values by layer, [layers, 2, max_batch_size, kv_heads, length, head_dim]
    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: Qwen3OmniMoeTalkerCodePredictorConfig, max_batch_size: int) -> None:
        super().__init__()
        self.num_predicted: int = config.num_code_groups - 1
        self.model = _Decoder(config)
        self.lm_head = nn.ModuleList(
            nn.Linear(config.hidden_size, config.vocab_size, bias=False) for _ in range(self.num_predicted)
        )
        # A frame's sequence: the talker's hidden state, the sampled token, and all codes but the last.
        length = 1 + self.num_predicted
        heads = (config.num_key_value_heads, length, config.head_dim)
        cache = torch.zeros(config.num_hidden_layers, 2, max_batch_size, *heads)
        self.register_buffer("cache", cache, persistent=False)
        theta = config.rope_parameters["rope_theta"]
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.outer(torch.arange(length, dtype=torch.float32), theta**-steps).repeat(1, 2)
        self.register_buffer("cos", angles.cos().to(cache.dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(cache.dtype), persistent=False)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, choose: Choose) -> torch.Tensor:
        """Codes int64 `[n, num_predicted]`, for the talker's `hidden` states `[n, width]` and the `embedded`
        tokens `[n, width]` sampled from them; `n` is at most `max_batch_size`."""
        inputs, first = torch.stack((hidden, embedded), 1), 0
        codes: list[torch.Tensor] = []
        for codebook, head in enumerate(self.lm_head):
            code = choose(head(self._computed(inputs, first)), codebook)
            codes.append(code)
            first += inputs.shape[1]
            inputs = self.model.codec_embedding[codebook](code)[:, None]
        return torch.stack(codes, 1)

    def embed(self, codes: torch.Tensor) -> torch.Tensor:
        """The sum of the embeddings of `codes` `[n, num_predicted]`: float32 `[n, width]`."""
        codes = codes.long()
        embedded = [table(codes[:, index]) for index, table in enumerate(self.model.codec_embedding)]
        return torch.stack(embedded).sum(0, dtype=torch.float32)

    def _computed(self, inputs: torch.Tensor, first: int) -> torch.Tensor:
        """The last hidden states `[n, width]` for `inputs` `[n, count, width]` at positions from `first`."""
        places = slice(first, first + inputs.shape[1])
        hidden = inputs
        for layer, cache in zip(self.model.layers, self.cache, strict=True):
            hidden = layer(hidden, self.cos[places], self.sin[places], cache[:, : len(inputs)], first)
        normed: torch.Tensor = self.model.norm(hidden[:, -1])
        return normed


class _Decoder(nn.Module):
    def __init__(self, config: Qwen3OmniMoeTalkerCodePredictorConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.codec_embedding = nn.ModuleList(
            nn.Embedding(config.vocab_size, config.hidden_size) for _ in range(config.num_code_groups - 1)
        )


class _Layer(nn.Module):
    def __init__(self, config: Qwen3OmniMoeTalkerCodePredictorConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _MLP(config)
        self.input_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: torch.Tensor, first: int
    ) -> torch.Tensor:
        """See `_Attention.forward`."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, cache, first)
        added: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + added


class _Attention(nn.Module):
    def __init__(self, config: Qwen3OmniMoeTalkerCodePredictorConfig) -> None:
        super().__init__()
        width, self._head_dim = config.hidden_size, config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, width, bias=config.attention_bias)
        self.q_norm = _Norm(config.head_dim, config.rms_norm_eps)
        self.k_norm = _Norm(config.head_dim, config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: torch.Tensor, first: int
    ) -> torch.Tensor:
        """`[n, count, width]`, as `hidden`. `cos` and `sin` are `[count, head_dim]`. `cache` `[2, n, kv_heads,
        length, head_dim]` holds keys and values of the first `first` positions and takes the new ones."""
        split = (*hidden.shape[:2], -1, self._head_dim)
        queries = _rotated(self.q_norm(self.q_proj(hidden).view(split)).transpose(1, 2), cos, sin)
        end = first + hidden.shape[1]
        cache[0, :, :, first:end] = _rotated(
            self.k_norm(self.k_proj(hidden).view(split)).transpose(1, 2), cos, sin
        )
        cache[1, :, :, first:end] = self.v_proj(hidden).view(split).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(
            queries, cache[0, :, :, :end], cache[1, :, :, :end], is_causal=first == 0, enable_gqa=True
        )
        projected: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return projected


class _MLP(nn.Module):
    def __init__(self, config: Qwen3OmniMoeTalkerCodePredictorConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.down_proj(
            functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        )
        return projected


class _Norm(nn.Module):
    """`Qwen3OmniMoeRMSNorm`: rounds before it applies the weight, unlike torch's and vLLM's."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._epsilon = epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon)
        return self.weight * normed.to(hidden.dtype)


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of `[..., count, head_dim]`."""
    lower, upper = heads.chunk(2, -1)
    return heads * cos + torch.cat((-upper, lower), -1) * sin
