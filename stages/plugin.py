"""Entry point of vLLM's plugin group `vllm.general_plugins`: runs in every process of every engine."""

import os

from omni_server.config.pipeline import MODEL_FAMILY_VARIABLE, installed_families
from omni_server.family import load_family


def register() -> None:
    """Make the model classes of the served family known to vLLM; those of all installed ones where no server
    says which it is."""
    served = os.environ.get(MODEL_FAMILY_VARIABLE)
    for name in (served,) if served else installed_families():
        load_family(name).register()
