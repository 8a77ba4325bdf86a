"""The Qwen3-Omni config that vLLM sees in each stage's engine (`hf_overrides`).

vLLM also calls these functions with a placeholder of another class, which they return unchanged.
"""

from copy import deepcopy

from transformers import PreTrainedConfig, Qwen3OmniMoeConfig


def thinker_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The whole config; vLLM's thinker reads its part of it, and ours the talker's projection."""
    if isinstance(config, Qwen3OmniMoeConfig):
        config.architectures = ["Qwen3OmniThinker"]
    return config


def talker_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the talker's decoder, with the fields of other parts that the model needs."""
    if not isinstance(config, Qwen3OmniMoeConfig):
        return config
    talker = config.talker_config
    stage: PreTrainedConfig = talker.text_config
    stage.architectures = ["Qwen3OmniTalker"]
    stage.tie_word_embeddings = False
    stage.code_predictor_config = talker.code_predictor_config
    stage.codec_eos_token_id = talker.codec_eos_token_id
    stage.thinker_hidden_size = talker.thinker_hidden_size
    stage.text_vocab_size = config.thinker_config.text_config.vocab_size
    return stage


def code2wav_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The code2wav config with the fields that vLLM requires of any model. Lengths are in codes, which are
    the stage's prompt."""
    if not isinstance(config, Qwen3OmniMoeConfig):
        return config
    stage: PreTrainedConfig = deepcopy(config.code2wav_config)
    stage.architectures = ["Qwen3OmniCode2Wav"]
    stage.vocab_size = stage.codebook_size
    stage.max_position_embeddings *= stage.num_quantizers
    return stage
