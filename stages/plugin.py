"""Entry point of vLLM's plugin group `vllm.general_plugins`: runs in every process of every engine."""

from omni_server.family import families_of_this_process


def register() -> None:
    """Make the model classes of the served family known to vLLM; those of all installed ones where no server
    says which it is."""
    for family in families_of_this_process():
        family.register()
