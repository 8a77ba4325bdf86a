"""The talker as a vLLM model: a Qwen2 decoder over codec tokens with rows of the thinker as input.

Reference: `Qwen2_5OmniTalkerForConditionalGeneration` in transformers. It differs from Qwen2 in three ways:
the head dimension is the config's own (the 7B has 12 heads of 128 over a hidden size of 896), the codec
embeddings are as wide as the thinker's hidden states, and a projection narrows the summed input.
"""

from typing import Any

import torch
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CacheConfig, VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM, Qwen2Model
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors

from stages.qwen2_5_omni.rope_attention import use_rope_attention
from stages.qwen_omni.codec_talker import CodecTalker

_CHECKPOINT = WeightsMapper(
    orig_to_new_prefix={
        "talker.codec_head.": "lm_head.",
        "talker.thinker_to_talker_proj.": "model.thinker_to_talker_proj.",
        "talker.": "",
        "thinker.": None,
        "token2wav.": None,
    }
)


class TalkerAttention(LlamaAttention):
    """Llama's attention, with the config's head dimension, plus Qwen2's query, key and value biases."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "bias": True})


class TalkerDecoderLayer(LlamaDecoderLayer):
    """Computes what `Qwen2DecoderLayer` does, with the attention above."""

    def __init__(
        self,
        config: Any,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        """Accepts `Qwen2Model`'s arguments; both `cache_config` and `quant_config` equal the engine's."""
        super().__init__(get_current_vllm_config(), prefix, config, TalkerAttention)


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

    The projection must be part of what vLLM compiles: the CUDA graphs of a compiled model's pieces read their
    inputs at the addresses from capture, and only the runner's own tensors keep their addresses. Outside, the
    projection's result would have a new address in each step.
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


class Qwen2_5OmniTalker(CodecTalker):
    """`inputs_embeds` `[num_tokens, embedding_size]`: codec embeddings overlaid with the thinker's rows."""

    checkpoint = _CHECKPOINT
    hf_to_vllm_mapper = _CHECKPOINT | Qwen2Model.hf_to_vllm_mapper
    packed_modules_mapping = Qwen2ForCausalLM.packed_modules_mapping
    model: TalkerModel

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        # Only ids that code2wav has an embedding for, and the two that end the speech, may be sampled. The
        # reference suppresses only the start id; ids beyond the table would make its DiT fail.
        banned = torch.arange(config.vocab_size) >= config.codec_table_size
        banned[[config.tts_codec_pad_token_id, config.tts_codec_end_token_id]] = False
        banned[config.tts_codec_start_token_id] = True
        model = TalkerModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        super().__init__(model, banned, vllm_config, prefix)

    @property
    def token_embedding(self) -> VocabParallelEmbedding:
        return self.model.embed_tokens

    def attends_by_kernel(self, metadata: dict[str, Any]) -> bool:
        """Whether our kernel computes all layers' attention in a step; `metadata`: vLLM's, by layer."""
        layers = self.model.attentions
        return bool(layers) and all(
            layer.attends_by_kernel(metadata[layer.attn.layer_name]) for layer in layers
        )
