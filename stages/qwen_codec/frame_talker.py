"""A talker that samples the first code of a frame, and the code predictor beside it, which adds the other 15
in the same step (`stages.runtime.frame_predictor`)."""

from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorConfig,
)
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen2 import Qwen2Model
from vllm.model_executor.models.qwen3_moe import Qwen3MoeModel

from omni_server.protocol.runtime_config import StageRuntimeConfig
from stages.qwen_codec.code_predictor import CodePredictor
from stages.qwen_omni.codec_talker import CodecTalker
from stages.runtime.checkpoint_weights import without_parts
from stages.runtime.code_sampling import Choose

_NUM_CONTROL_IDS = 1024
"""Ids at the end of the talker's vocabulary that the references suppress, except the end of speech
(`suppress_tokens` in `Qwen3OmniMoeForConditionalGeneration.generate`)."""

_ROWS_PER_CHUNK = 4096


class TextRows(nn.Module):
    """Makes the row of each text id: an embedding, projected to the talker's width."""

    def __init__(self, vocab_size: int, embedding_width: int, inner_width: int, width: int) -> None:
        super().__init__()
        # In host memory: it is read once.
        self.embedding = nn.Embedding(vocab_size, embedding_width, device="cpu")
        self.projection = nn.Sequential(  # `Qwen3OmniMoeTalkerResizeMLP`
            OrderedDict(
                linear_fc1=nn.Linear(embedding_width, inner_width),
                activation=nn.SiLU(),
                linear_fc2=nn.Linear(inner_width, width),
            )
        )
        self._width = width

    def table(self) -> torch.Tensor:
        """All rows, `[vocab_size, width]`, in host memory."""
        embedding, device = self.embedding.weight, next(self.projection.parameters()).device
        table = embedding.new_empty(len(embedding), self._width)
        for rows, chunk in zip(table.split(_ROWS_PER_CHUNK), embedding.split(_ROWS_PER_CHUNK), strict=True):
            rows.copy_(self.projection(chunk.to(device)))
        return table


class FrameTalker(CodecTalker):
    """`inputs_embeds` `[num_tokens, hidden_size]`: codec embeddings of all codebooks, overlaid with rows of
    text. Implements `stages.runtime.frame_predictor.FramePredictor`."""

    def __init__(
        self,
        model: Qwen2Model | Qwen3MoeModel,
        text_rows: TextRows,
        predictor_config: Qwen3OmniMoeTalkerCodePredictorConfig,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        config = vllm_config.model_config.hf_config
        banned = torch.arange(config.vocab_size) >= config.vocab_size - _NUM_CONTROL_IDS
        banned[config.codec_eos_token_id] = False
        super().__init__(model, banned, vllm_config, prefix)
        runtime = vllm_config.additional_config
        self.code_predictor = CodePredictor(
            predictor_config,
            config.hidden_size,
            vllm_config.scheduler_config.max_num_seqs,
            use_kernels=isinstance(runtime, StageRuntimeConfig) and runtime.decoding_kernels,
        )
        self.num_predicted = self.code_predictor.num_predicted
        self.text_rows: TextRows | None = text_rows

    def predict(self, hidden: torch.Tensor, sampled: torch.Tensor, choose: Choose) -> torch.Tensor:
        codes: torch.Tensor = self.code_predictor(hidden, self.embed_input_ids(sampled), choose)
        return codes

    def embed_predicted(self, codes: torch.Tensor) -> torch.Tensor:
        return self.code_predictor.embed(codes)

    @torch.no_grad()
    def row_table(self) -> torch.Tensor:
        """The row of each text id, `[text_vocab_size, hidden_size]`, in host memory. Call it once, after the
        weights have been loaded: what the rows are made of is not kept."""
        assert self.text_rows is not None, "row_table was called before"
        table, self.text_rows = self.text_rows.table(), None
        return table

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Raises `ConfigError` for a part of the code predictor that is missing, unknown or misshapen: vLLM
        checks whole parameters only, and not those of quantized checkpoints."""
        parts = self.code_predictor.checkpoint_parts()
        loaded = super().load_weights(without_parts(parts, weights, "talker.code_predictor."))
        return loaded | {f"code_predictor.{name}" for name, _ in self.code_predictor.named_parameters()}
