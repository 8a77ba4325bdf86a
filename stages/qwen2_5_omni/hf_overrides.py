"""The Qwen2.5-Omni config that vLLM sees in each stage's engine (`hf_overrides`).

vLLM also calls these functions with a placeholder of another class, which they return unchanged.
"""

from copy import deepcopy

from transformers import PreTrainedConfig, Qwen2_5OmniConfig


def thinker_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The whole config; vLLM's thinker reads its part of it."""
    if isinstance(config, Qwen2_5OmniConfig):
        config.architectures = ["Qwen2_5OmniThinker"]
    return config


def talker_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The talker's config."""
    if not isinstance(config, Qwen2_5OmniConfig):
        return config
    talker: PreTrainedConfig = config.talker_config
    talker.architectures = ["Qwen2_5OmniTalker"]
    # `ModelConfig.get_inputs_embeds_size` reads it: inputs are as wide as the thinker's states.
    talker.projection_size = talker.embedding_size
    # The DiT's table has no row for larger ids (Qwen2_5OmniToken2WavDiTModel.text_embed).
    talker.codec_table_size = config.token2wav_config.dit_config.num_embeds + 1
    return talker


def code2wav_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The token2wav config with the fields that vLLM requires of any model. Lengths are in codec tokens,
    which are the stage's prompt."""
    if not isinstance(config, Qwen2_5OmniConfig):
        return config
    stage = deepcopy(config.token2wav_config)
    dit = stage.dit_config
    stage.architectures = ["Qwen2_5OmniCode2Wav"]
    stage.vocab_size = dit.num_embeds + 1
    stage.hidden_size = dit.hidden_size
    stage.num_hidden_layers = dit.num_hidden_layers
    stage.num_attention_heads = dit.num_attention_heads
    stage.num_key_value_heads = dit.num_attention_heads
    stage.head_dim = dit.head_dim
    stage.max_position_embeddings = dit.max_position_embeddings // dit.repeats
    return stage
