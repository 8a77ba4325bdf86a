"""A pipeline's neural networks: by their configs alone, for folders without weights, and with weights stored
in float8 (Diffusers' layerwise casting)."""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.hooks import apply_layerwise_casting
from diffusers.hooks.layerwise_casting import DEFAULT_SKIP_MODULES_PATTERN
from transformers import PreTrainedModel

from stages.diffusers.pipeline_folder import PipelineFolder, component_class
from stages.diffusers.stepped_pipeline import DENOISERS

STORED = torch.float8_e4m3fn
TEXT_ENCODER = "text_encoder"
_SKIPPED_OF_TEXT_ENCODERS = (
    *DEFAULT_SKIP_MODULES_PATTERN,
    "embed",  # pipelines take the type of a text encoder's first weight for that of its results
    "^shared$",
    r"\.wo$",  # T5 converts its input to the type of these weights
    "lora_",
)


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


def cast_weights(modules: Mapping[str, torch.nn.Module], compute_dtype: torch.dtype) -> None:
    """Casts the linear layers and convolutions of denoisers and text encoders. Norms and embeddings
    are left as they are. `modules` are the components by name."""
    for name, module in modules.items():
        if name in DENOISERS and isinstance(module, ModelMixin):
            module.enable_layerwise_casting(storage_dtype=STORED, compute_dtype=compute_dtype)
        elif name.startswith(TEXT_ENCODER):
            apply_layerwise_casting(
                module, STORED, compute_dtype, skip_modules_pattern=_SKIPPED_OF_TEXT_ENCODERS
            )
