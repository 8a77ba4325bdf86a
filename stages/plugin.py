"""Entry point of vLLM's plugin group `vllm.general_plugins`: runs in every process of every engine."""

from omni_server.config.pipeline import families_of_this_process
from omni_server.family import load_family


def register() -> None:
    """Make the model classes of the served family known to vLLM; those of all installed ones where no server says
    which it is."""
    for name in families_of_this_process():
        load_family(name).register()
