"""The Qwen3-Omni config that vLLM sees in each stage's engine (`hf_overrides`).

vLLM also calls these functions with a placeholder of another class, which they return unchanged.
"""

from copy import deepcopy

from transformers import PreTrainedConfig
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeConfig

CODE2WAV = "Qwen3OmniCode2WavStage"
"""Name of the model class in vLLM's registry."""


def code2wav_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The code2wav config with the fields that vLLM requires of any model. Lengths are in codes, which are
    the stage's prompt."""
    if not isinstance(config, Qwen3OmniMoeConfig):
        return config
    stage: PreTrainedConfig = deepcopy(config.code2wav_config)
    stage.architectures = [CODE2WAV]
    stage.vocab_size = stage.codebook_size
    stage.max_position_embeddings *= stage.num_quantizers
    return stage
