"""How a family declares the models of its stages: as data, since only engines import them."""

from collections.abc import Mapping
from typing import ClassVar, cast

from omni_server.config.pipeline import imported
from omni_server.family import HfOverrides


class DeclaresModels:
    """Implements a part of `omni_server.family.ModelFamily`."""

    models: ClassVar[Mapping[str, str]]
    """By stage, `package.module:Class`. vLLM knows a class by its own name."""
    configs: ClassVar[str]
    """The module with a function for vLLM's `hf_overrides` for each stage, `talker_config` for `talker`,
    which names the class of the model in `architectures`."""

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        return cast(HfOverrides, imported(f"{self.configs}:{model_stage}_config"))

    def register(self) -> None:
        from vllm import ModelRegistry

        for name in self.models.values():
            # A class, not its name: vLLM would import a name in a separate process to inspect the class.
            model = cast(type, imported(name))
            ModelRegistry.register_model(model.__name__, model)


def modules_of(models: Mapping[str, str]) -> tuple[str, ...]:
    """For `ModelFamily.engine_modules`."""
    return tuple(name.partition(":")[0] for name in models.values())
