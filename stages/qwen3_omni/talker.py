"""The talker as a vLLM model: a Qwen3-MoE decoder over codec tokens, and the code predictor beside it.

Reference: `Qwen3OmniMoeTalkerForConditionalGeneration` in transformers. The talker samples the first code of
a frame; the predictor adds the other 15 in the same step (`stages.runtime.frame_predictor`).
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorConfig,
)
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM, Qwen3MoeModel
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors

from omni_server.protocol.runtime_config import StageRuntimeConfig
from stages.qwen3_omni.step_rotary import use_step_rotary
from stages.qwen_codec.code_predictor import CodePredictor, CodePredictorSizes
from stages.qwen_omni.codec_talker import CodecTalker
from stages.runtime.code_sampling import Choose, CodeSampling

CODE_SAMPLING = CodeSampling(temperature=1.0, top_k=50, top_p=0.8)
"""Unless the stage config says otherwise. Literals in
`Qwen3OmniMoeTalkerForConditionalGeneration.prepare_inputs_for_generation`; the temperature is the default of
`generate`."""

NUM_CONTROL_IDS = 1024
"""Ids at the end of the talker's vocabulary that the reference suppresses, except the end of speech
(`suppress_tokens` in `Qwen3OmniMoeForConditionalGeneration.generate`)."""

_THINKER_TABLE = "thinker.model.embed_tokens."
_CHECKPOINT = WeightsMapper(
    orig_to_new_prefix={
        "talker.codec_head.": "lm_head.",
        "talker.model.codec_embedding.": "model.embed_tokens.",
        "talker.hidden_projection.": None,  # for rows of media, which the thinker's stage makes
        "talker.": "",
        _THINKER_TABLE: "text_rows.embedding.",
        "text_projection.": "text_rows.projection.",
        "thinker.": None,
        "code2wav.": None,
    }
)
_ROWS_PER_CHUNK = 4096


class TextProjection(nn.Module):
    """`Qwen3OmniMoeTalkerResizeMLP`."""

    def __init__(self, thinker_width: int, inner_width: int, width: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(thinker_width, inner_width)
        self.linear_fc2 = nn.Linear(inner_width, width)

    def forward(self, embedded: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.linear_fc2(functional.silu(self.linear_fc1(embedded)))
        return projected


class TextRows(nn.Module):
    """Makes the row of each text id: the thinker's embedding, projected to the talker's width."""

    def __init__(self, vocab_size: int, thinker_width: int, inner_width: int, width: int) -> None:
        super().__init__()
        # In host memory: it is read once.
        self.embedding = nn.Embedding(vocab_size, thinker_width, device="cpu")
        self.projection = TextProjection(thinker_width, inner_width, width)

    def table(self) -> torch.Tensor:
        """All rows, `[vocab_size, width]`, in host memory."""
        embedding, device = self.embedding.weight, self.projection.linear_fc1.weight.device
        table = embedding.new_empty(len(embedding), self.projection.linear_fc2.out_features)
        for rows, chunk in zip(table.split(_ROWS_PER_CHUNK), embedding.split(_ROWS_PER_CHUNK), strict=True):
            rows.copy_(self.projection(chunk.to(device)))
        return table


def predictor_sizes(config: Qwen3OmniMoeTalkerCodePredictorConfig) -> CodePredictorSizes:
    """Raises `ValueError` for biases in the attention, which no published model has."""
    if config.attention_bias:
        raise ValueError("a code predictor with attention_bias is not supported")
    return CodePredictorSizes(
        num_predicted=config.num_code_groups - 1,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"],
    )


class Qwen3OmniTalker(CodecTalker):
    """`inputs_embeds` `[num_tokens, hidden_size]`: codec embeddings of all codebooks, overlaid with rows of
    text. Implements `stages.runtime.frame_predictor.FramePredictor`."""

    checkpoint = hf_to_vllm_mapper = _CHECKPOINT
    packed_modules_mapping = Qwen3MoeForCausalLM.packed_modules_mapping
    code_sampling = CODE_SAMPLING

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        banned = torch.arange(config.vocab_size) >= config.vocab_size - NUM_CONTROL_IDS
        banned[config.codec_eos_token_id] = False
        model = Qwen3MoeModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        super().__init__(model, banned, vllm_config, prefix)
        self._rotary = use_step_rotary(model, vllm_config.scheduler_config.max_num_batched_tokens)
        runtime = vllm_config.additional_config
        self.code_predictor = CodePredictor(
            predictor_sizes(config.code_predictor_config),
            vllm_config.scheduler_config.max_num_seqs,
            use_kernels=isinstance(runtime, StageRuntimeConfig) and runtime.decoding_kernels,
        )
        self.num_predicted = self.code_predictor.num_predicted
        self.text_rows: TextRows | None = TextRows(
            config.text_vocab_size, config.thinker_hidden_size, config.intermediate_size, config.hidden_size
        )

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Hidden states `[num_tokens, hidden_size]`; `positions` is `[3, num_tokens]`, packed."""
        rows = self._rotary.begin_step(positions)
        return self.model(input_ids, rows, intermediate_tensors, inputs_embeds)

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

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Lets vLLM's loader skip shards without weights that the talker needs."""
        return not name.startswith(("talker.", _THINKER_TABLE))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = super().load_weights(weights)
        self.code_predictor.check_loaded()
        return loaded
