"""The talker as a vLLM model: a Qwen2 decoder over codec tokens whose inputs are rows of the thinker.

Reference: `Qwen2_5OmniTalkerForConditionalGeneration` in transformers. It differs from Qwen2 in three ways:
the head dimension is the config's own (the 7B has 12 heads of 128 over a hidden size of 896), the codec
embeddings are as wide as the thinker's hidden states, and a projection narrows the summed input.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CacheConfig, VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.qwen2 import (
    Qwen2Attention,
    Qwen2DecoderLayer,
    Qwen2ForCausalLM,
    Qwen2MLP,
    Qwen2Model,
)
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors

from stages.qwen2_5_omni.rope_attention import use_rope_attention

_CHECKPOINT = WeightsMapper(
    orig_to_new_prefix={
        "talker.codec_head.": "lm_head.",
        "talker.thinker_to_talker_proj.": "model.thinker_to_talker_proj.",
        "talker.": "",
        "thinker.": None,
        "token2wav.": None,
    }
)


class TalkerAttention(Qwen2Attention):
    """`Qwen2Attention` derives head_dim from the hidden size; here the config gives it."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, num_kv_heads: int, **kwargs: Any) -> None:
        super().__init__(hidden_size=num_heads * head_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, **kwargs)
        if hidden_size != num_heads * head_dim:
            self.hidden_size = hidden_size
            prefix, quant_config = kwargs["prefix"], kwargs["quant_config"]
            self.qkv_proj = QKVParallelLinear(
                hidden_size,
                head_dim,
                num_heads,
                num_kv_heads,
                bias=True,
                quant_config=quant_config,
                prefix=f"{prefix}.qkv_proj",
            )
            self.o_proj = RowParallelLinear(
                num_heads * head_dim, hidden_size, bias=False, quant_config=quant_config, prefix=f"{prefix}.o_proj"
            )


class TalkerDecoderLayer(Qwen2DecoderLayer):
    """`Qwen2DecoderLayer` with the attention above; its forward is inherited."""

    def __init__(
        self,
        config: Any,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        # Not super().__init__(): it would register an attention layer of the wrong shape under this prefix.
        nn.Module.__init__(self)
        self.hidden_size = config.hidden_size
        self.self_attn = TalkerAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.head_dim,
            config.num_key_value_heads,
            rope_parameters=config.rope_parameters,
            max_position=config.max_position_embeddings,
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.self_attn",
        )
        self.mlp = Qwen2MLP(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            quant_config=quant_config,
            prefix=f"{prefix}.mlp",
        )
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


@support_torch_compile(
    dynamic_arg_dims={
        "input_ids": {0: "b"},
        "positions": {-1: "b"},  # [3, num_tokens]
        "intermediate_tensors": {0: "b"},
        "inputs_embeds": {0: "b"},
    }
)
class TalkerModel(Qwen2Model):
    """The projection and the decoder layers.

    The projection belongs in here, where vLLM compiles: CUDA graphs of a compiled model's pieces read what they were
    captured with from where it lay then, and of all tensors only the runner's own stay in their place. What the
    projection makes would lie elsewhere in each step.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, decoder_layer_type=TalkerDecoderLayer)
        config = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.embedding_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "embed_tokens"),
        )
        self.thinker_to_talker_proj = ReplicatedLinear(
            config.embedding_size,
            config.hidden_size,
            bias=True,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "thinker_to_talker_proj"),
        )
        self.attentions = use_rope_attention(self.layers, vllm_config)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)
        projected, _ = self.thinker_to_talker_proj(inputs_embeds)
        return super().forward(None, positions, intermediate_tensors, projected)


class Qwen2_5OmniTalker(Qwen2ForCausalLM, SupportsMRoPE):
    """`inputs_embeds` is `[num_tokens, embedding_size]`: codec embeddings with the thinker's rows laid over."""

    hf_to_vllm_mapper = _CHECKPOINT | Qwen2Model.hf_to_vllm_mapper

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        config = vllm_config.model_config.hf_config
        quant_config = vllm_config.quant_config
        self.config = config
        self.quant_config = quant_config
        self.model = TalkerModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors
        # Ids that may be sampled: what code2wav has an embedding for, and the two that end the utterance.
        # The reference suppresses only the start id; ids beyond the table would make its DiT fail.
        banned = torch.arange(config.vocab_size) >= config.codec_table_size
        banned[[config.tts_codec_pad_token_id, config.tts_codec_end_token_id]] = False
        banned[config.tts_codec_start_token_id] = True
        self.register_buffer("banned_ids", banned, persistent=False)

    @property
    def token_embedding(self) -> VocabParallelEmbedding:
        return self.model.embed_tokens

    def attends_by_kernel(self, metadata: dict[str, Any]) -> bool:
        """Whether our kernel is the attention of every layer in a step with this metadata of vLLM's, by layer."""
        layers = self.model.attentions
        return bool(layers) and all(layer.attends_by_kernel(metadata[layer.attn.layer_name]) for layer in layers)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits = super().compute_logits(hidden_states)
        if logits is not None:
            logits.masked_fill_(self.banned_ids, float("-inf"))
        return logits

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[torch.Tensor, int]:
        """Plain positions, `[3, n]`, for vLLM's own warm-up; a request's positions come with its rows."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Lets vLLM's loader skip shards that hold nothing of the talker."""
        return not name.startswith("talker.")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=_CHECKPOINT)
