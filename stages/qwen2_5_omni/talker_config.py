"""Gives vLLM the talker's part of a Qwen2.5-Omni config (`hf_overrides` of the talker's engine)."""

from transformers import PretrainedConfig, Qwen2_5OmniConfig

ARCHITECTURE = "Qwen2_5OmniTalkerStage"
"""Name under which the model class is registered with vLLM."""


def talker_config(config: PretrainedConfig) -> PretrainedConfig:
    """vLLM also calls this with a stand-in that has no talker; that one goes back unchanged."""
    if not isinstance(config, Qwen2_5OmniConfig):
        return config
    talker: PretrainedConfig = config.talker_config
    talker.architectures = [ARCHITECTURE]
    # `ModelConfig.get_inputs_embeds_size` reads this: the talker's inputs are as wide as the thinker's
    # states.
    talker.projection_size = talker.embedding_size
    # Ids from here on have no row in the DiT's table (Qwen2_5OmniToken2WavDiTModel.text_embed).
    talker.codec_table_size = config.token2wav_config.dit_config.num_embeds + 1
    return talker
