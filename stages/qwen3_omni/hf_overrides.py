"""The Qwen3-Omni config that vLLM sees in each stage's engine (`hf_overrides`).

vLLM also calls these functions with a placeholder of another class, which they return unchanged.
"""

from transformers import PreTrainedConfig, Qwen3OmniMoeConfig

THINKER = "Qwen3OmniThinkerStage"
"""Name of the model class in vLLM's registry."""


def thinker_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The whole config; vLLM's thinker reads its part of it, and ours the talker's projection."""
    if isinstance(config, Qwen3OmniMoeConfig):
        config.architectures = [THINKER]
    return config
