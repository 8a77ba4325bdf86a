"""The talker as a vLLM model: a Qwen3-MoE decoder over codec tokens, and the code predictor beside it.

Reference: `Qwen3OmniMoeTalkerForConditionalGeneration` in transformers.
"""

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM, Qwen3MoeModel
from vllm.model_executor.models.utils import WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors

from stages.qwen3_omni.step_rotary import use_step_rotary
from stages.qwen_codec.frame_talker import FrameTalker, TextRows
from stages.runtime.code_sampling import CodeSampling

CODE_SAMPLING = CodeSampling(temperature=1.0, top_k=50, top_p=0.8)
"""Unless the stage config says otherwise. Literals in
`Qwen3OmniMoeTalkerForConditionalGeneration.prepare_inputs_for_generation`; the temperature is the default of
`generate`."""

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


class Qwen3OmniTalker(FrameTalker):
    checkpoint = hf_to_vllm_mapper = _CHECKPOINT
    packed_modules_mapping = Qwen3MoeForCausalLM.packed_modules_mapping
    code_sampling = CODE_SAMPLING

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        text_rows = TextRows(
            config.text_vocab_size, config.thinker_hidden_size, config.intermediate_size, config.hidden_size
        )
        model = Qwen3MoeModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        super().__init__(model, text_rows, config.code_predictor_config, vllm_config, prefix)
        self._rotary = use_step_rotary(model, vllm_config.scheduler_config.max_num_batched_tokens)

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

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Lets vLLM's loader skip shards without weights that the talker needs."""
        return not name.startswith(("talker.", _THINKER_TABLE))
