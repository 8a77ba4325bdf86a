"""Entry point of vLLM's plugin group `vllm.general_plugins`: runs in every process of every engine."""


def register() -> None:
    """Make the model classes of all families known to vLLM."""
    from stages.qwen2_5_omni import FAMILY

    FAMILY.register()
