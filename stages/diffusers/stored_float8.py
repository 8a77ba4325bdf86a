"""Stores weights in float8, and computes in the pipeline's own precision: Diffusers' layerwise casting."""

from collections.abc import Mapping

import torch
from diffusers import ModelMixin
from diffusers.hooks import apply_layerwise_casting
from diffusers.hooks.layerwise_casting import DEFAULT_SKIP_MODULES_PATTERN

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
