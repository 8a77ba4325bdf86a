"""How the families of these tests put their own models in the place of the real ones."""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from omni_server.family import HfOverrides, ModelFamily


def register_models(module: str, classes: Mapping[str, str]) -> None:
    """With vLLM; `classes` of `module`, by stage."""
    from vllm import ModelRegistry

    models = import_module(module)
    for name in classes.values():
        ModelRegistry.register_model(name, vars(models)[name])


def override_with(family: ModelFamily, model_stage: str, classes: Mapping[str, str]) -> HfOverrides:
    """The family's own override of the stage's config, and the class of `classes` in it."""
    return partial(_replaced, family.hf_overrides(model_stage), classes[model_stage])


def _replaced(override: HfOverrides | None, name: str, config: Any) -> Any:
    """A function of a module, as vLLM sends it to the engines by its name."""
    if override is not None:
        config = override(config)
    config.architectures = [name]
    return config
