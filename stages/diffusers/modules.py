"""A pipeline's neural networks by their configs alone, for folders without weights."""

from typing import Any

import torch
from transformers import PreTrainedModel

from stages.diffusers.pipeline_folder import PipelineFolder, component_class


def empty_modules(folder: PipelineFolder) -> dict[str, torch.nn.Module]:
    """Returns the components that have weights, by name. Their parameters are on the meta device; buffers,
    such as tables of positions, are computed."""
    from accelerate import init_empty_weights

    modules: dict[str, torch.nn.Module] = {}
    for name in folder.components:
        cls = component_class(folder, name)
        if not issubclass(cls, torch.nn.Module):
            continue
        with init_empty_weights(include_buffers=False):
            module = _from_config(cls, folder, name)
        if isinstance(module, PreTrainedModel):
            module.tie_weights()
        modules[name] = module.eval()
    return modules


def _from_config(cls: Any, folder: PipelineFolder, name: str) -> torch.nn.Module:
    path = folder.path / name
    module: torch.nn.Module
    if hasattr(cls, "from_config"):
        module = cls.from_config(cls.load_config(path))
    else:
        module = cls(cls.config_class.from_pretrained(path))
    return module
