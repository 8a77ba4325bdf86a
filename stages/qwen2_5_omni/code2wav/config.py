"""The view of a Qwen2.5-Omni config that vLLM gets for the code2wav stage."""

from copy import deepcopy

from transformers import PreTrainedConfig
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniConfig

ARCHITECTURE = "Qwen2_5OmniCode2WavStage"
"""Name of the model class in vLLM's registry."""


def code2wav_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """`hf_overrides` of the stage: the token2wav part of the whole config, with the fields that vLLM asks of
    any model.

    Lengths are in codec tokens, because those are the stage's prompt. Any other config is returned as it is:
    vLLM also calls this with an empty one.
    """
    if not isinstance(config, Qwen2_5OmniConfig):
        return config
    stage = deepcopy(config.token2wav_config)
    dit = stage.dit_config
    stage.architectures = [ARCHITECTURE]
    stage.vocab_size = dit.num_embeds + 1
    stage.hidden_size = dit.hidden_size
    stage.num_hidden_layers = dit.num_hidden_layers
    stage.num_attention_heads = dit.num_attention_heads
    stage.num_key_value_heads = dit.num_attention_heads
    stage.head_dim = dit.head_dim
    stage.max_position_embeddings = dit.max_position_embeddings // dit.repeats
    return stage
