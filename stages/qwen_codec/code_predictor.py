"""A talker's code predictor: the further codes of a frame for each codec token, one after the other.

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

from stages.qwen_codec.decoder_operations import DecoderOperations
from stages.runtime.code_sampling import Choose
from stages.runtime.kernel_launch import fits_decoding_kernels


class CodePredictor(nn.Module):
    """Weights that are multiplied by the same input are one parameter, and so are the tables of all
    codebooks."""

    cache: torch.Tensor  # keys and values by layer, [layers, 2, max_batch_size, kv_heads, length, head_dim]
    cos: torch.Tensor  # [length, head_dim]
    sin: torch.Tensor

    def __init__(
        self,
        config: Qwen3OmniMoeTalkerCodePredictorConfig,
        talker_width: int,
        max_batch_size: int,
        *,
        use_kernels: bool = True,
    ) -> None:
        """The kernels compute the layers where they are wanted and support the device and the sizes, and
        torch everywhere else."""
        super().__init__()
        width, head_dim = config.hidden_size, config.head_dim
        self.num_predicted: int = config.num_code_groups - 1
        """Codes of a frame, without the one that the talker samples."""
        tables = (self.num_predicted, config.vocab_size)
        self.codec_embedding = nn.Parameter(torch.empty(*tables, talker_width))
        self.lm_head = nn.Parameter(torch.empty(*tables, width))
        self.input_projection: nn.Linear | None = None
        if talker_width != width:
            self.input_projection = nn.Linear(talker_width, width)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(width))
        self.operations = DecoderOperations(config.rms_norm_eps)
        is_power_of_two = head_dim & (head_dim - 1) == 0
        if use_kernels and is_power_of_two and fits_decoding_kernels(self.norm.device):
            from stages.qwen_codec.decoder_kernels import KernelOperations

            self.operations = KernelOperations(config.rms_norm_eps)
        # A frame's sequence: the talker's hidden state, the sampled token, and all codes but the last.
        length = 1 + self.num_predicted
        heads = (config.num_key_value_heads, length, head_dim)
        cache = torch.zeros(config.num_hidden_layers, 2, max_batch_size, *heads)
        self.register_buffer("cache", cache, persistent=False)
        speeds = config.rope_parameters["rope_theta"] ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), speeds).repeat(1, 2)
        self.register_buffer("cos", angles.cos().to(cache.dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(cache.dtype), persistent=False)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, choose: Choose) -> torch.Tensor:
        """Codes int64 `[n, num_predicted]`, for the talker's `hidden` states `[n, talker_width]` and the
        `embedded` tokens `[n, talker_width]` sampled from them; `n` is at most `max_batch_size`."""
        inputs, first = torch.stack((hidden, embedded), 1), 0
        codes: list[torch.Tensor] = []
        for codebook in range(self.num_predicted):
            code = choose(self._logits(inputs, first, codebook), codebook)
            codes.append(code)
            first += inputs.shape[1]
            inputs = functional.embedding(code, self.codec_embedding[codebook])[:, None]
        return torch.stack(codes, 1)

    def embed(self, codes: torch.Tensor) -> torch.Tensor:
        """The sum of the embeddings of `codes` `[n, num_predicted]`: float32 `[n, talker_width]`."""
        vocabulary = self.codec_embedding.shape[1]
        first_rows = torch.arange(self.num_predicted, device=codes.device) * vocabulary
        embedded = functional.embedding(codes + first_rows, self.codec_embedding.flatten(0, 1))
        return embedded.sum(1, dtype=torch.float32)

    def _logits(self, inputs: torch.Tensor, first: int, codebook: int) -> torch.Tensor:
        """`[n, vocabulary]` for the last of `inputs` `[n, count, talker_width]`, which are at positions
        from `first`."""
        count = inputs.shape[1]
        hidden = inputs.flatten(0, 1)
        if self.input_projection is not None:
            hidden = self.input_projection(hidden)
        for layer, cache in zip(self.layers, self.cache, strict=True):
            hidden = layer(hidden, self.cos, self.sin, cache, first, count, self.operations)
        last = hidden[count - 1 :: count]
        return self.operations.linear(last, self.lm_head[codebook], norm=self.norm)

    def checkpoint_parts(self) -> dict[str, torch.Tensor]:
        """The parts of the parameters, by their names in the checkpoint below `talker.code_predictor`."""
        parts = {"model.norm.weight": self.norm.data}
        if self.input_projection is not None:
            for name, weight in self.input_projection.named_parameters():
                parts[f"small_to_mtp_projection.{name}"] = weight.data
        for index in range(self.num_predicted):
            parts[f"model.codec_embedding.{index}.weight"] = self.codec_embedding.data[index]
            parts[f"lm_head.{index}.weight"] = self.lm_head.data[index]
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, _Layer)
            for name, part in layer.checkpoint_parts().items():
                parts[f"model.layers.{index}.{name}.weight"] = part
        return parts


class _Layer(nn.Module):
    def __init__(self, config: Qwen3OmniMoeTalkerCodePredictorConfig) -> None:
        super().__init__()
        width, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        self._qkv_sizes = (queries, keys, keys)
        self.qkv_proj = nn.Parameter(torch.empty(sum(self._qkv_sizes), width))
        self.o_proj = nn.Parameter(torch.empty(width, queries))
        self.gate_up_proj = nn.Parameter(torch.empty(2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(width, inner))
        self.input_norm = nn.Parameter(torch.ones(width))
        self.post_attention_norm = nn.Parameter(torch.ones(width))
        self.query_norm = nn.Parameter(torch.ones(head_dim))
        self.key_norm = nn.Parameter(torch.ones(head_dim))

    def forward(
        self,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: torch.Tensor,
        first: int,
        count: int,
        operations: DecoderOperations,
    ) -> torch.Tensor:
        """`[n * count, width]`, as `hidden`. For the rest, see `DecoderOperations.attention`."""
        qkv = operations.linear(hidden, self.qkv_proj, norm=self.input_norm)
        norms = (self.query_norm, self.key_norm)
        attended = operations.attention(qkv, norms, cos, sin, cache, first, count)
        hidden = operations.linear(attended, self.o_proj, residual=hidden)
        inner = operations.gated_linear(hidden, self.gate_up_proj, norm=self.post_attention_norm)
        return operations.linear(inner, self.down_proj, residual=hidden)

    def checkpoint_parts(self) -> dict[str, torch.Tensor]:
        """See `CodePredictor.checkpoint_parts`."""
        queries, keys, values = self.qkv_proj.data.split(self._qkv_sizes)
        gate, up = self.gate_up_proj.data.chunk(2)
        return {
            "self_attn.q_proj": queries,
            "self_attn.k_proj": keys,
            "self_attn.v_proj": values,
            "self_attn.o_proj": self.o_proj.data,
            "self_attn.q_norm": self.query_norm.data,
            "self_attn.k_norm": self.key_norm.data,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": self.down_proj.data,
            "input_layernorm": self.input_norm.data,
            "post_attention_layernorm": self.post_attention_norm.data,
        }
