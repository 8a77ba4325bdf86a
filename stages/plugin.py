"""Entry point for vLLM's plugin group `vllm.general_plugins`. Runs in every process of every engine."""

from omni_server.family import families_of_this_process


def register() -> None:
    """Register the model classes of the served family with vLLM, or those of all installed families if no
    server specifies one."""
    for family in families_of_this_process():
        family.register()
