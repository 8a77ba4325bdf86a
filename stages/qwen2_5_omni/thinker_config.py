"""Names the thinker's class in a Qwen2.5-Omni config (`hf_overrides` of the thinker's engine)."""

from transformers import PretrainedConfig, Qwen2_5OmniConfig

ARCHITECTURE = "Qwen2_5OmniThinkerStage"
"""Name under which the model class is registered with vLLM."""


def thinker_config(config: PretrainedConfig) -> PretrainedConfig:
    """vLLM also calls this with a stand-in of another class; that one goes back unchanged."""
    if isinstance(config, Qwen2_5OmniConfig):
        config.architectures = [ARCHITECTURE]
    return config
