"""What the families' talkers have in common: a decoder whose output is codec tokens."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import SupportsLoRA, SupportsMRoPE, SupportsPP, SupportsQuant
from vllm.model_executor.models.qwen2 import Qwen2Model
from vllm.model_executor.models.qwen3_moe import Qwen3MoeModel
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors


class CodecTalker(nn.Module, SupportsLoRA, SupportsPP, SupportsQuant, SupportsMRoPE):
    checkpoint: ClassVar[WeightsMapper]
    """From the checkpoint's names to those of the model."""
    banned_ids: torch.Tensor

    def __init__(
        self,
        model: Qwen2Model | Qwen3MoeModel,
        banned_ids: torch.Tensor,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        """`banned_ids`: bool `[vocab_size]`, the codec tokens that are never sampled."""
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config
        self.quant_config = vllm_config.quant_config
        self.model = model
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=self.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = model.make_empty_intermediate_tensors
        self.register_buffer("banned_ids", banned_ids, persistent=False)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Hidden states `[num_tokens, hidden_size]`; `positions` is `[num_tokens]`, or `[3, num_tokens]` with
        M-RoPE."""
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of sampled codec tokens, as wide as `inputs_embeds`."""
        return self.model.embed_input_ids(input_ids)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Returns `[num_requests, vocab_size]`, or None on ranks without logits."""
        logits: torch.Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        if logits is not None:
            logits.masked_fill_(self.banned_ids, float("-inf"))
        return logits

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[Any]
    ) -> tuple[torch.Tensor, int]:
        """Plain positions, `[3, n]`, for prompts without media and for vLLM's warm-up; other positions arrive
        with the rows."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Lets vLLM's loader skip shards without weights that the talker needs."""
        return not name.startswith("talker.")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.checkpoint)
