"""Writes a Diffusers pipeline in the layout of a published one: tiny, or of its sizes and without weights."""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from omni_server.errors import ConfigError
from stages.diffusers.pipeline_folder import read_pipeline_folder
from tests.checkpoints.options import Options

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

GENUINE = "qwen-image"
"""The size of the published model of this name, and its pipeline."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class DiffusersCheckpoints:
    """Implements `tests.checkpoints.options.DemoFamily`. Diffusers is imported when one is written."""

    sizes: tuple[str, ...] = ("tiny",)
    genuine_sizes: Mapping[str, int] = MappingProxyType({GENUINE: 58})
    pipelines: tuple[str, ...] = ("qwen-image", "qwen-image-edit", "sd15", "sd3", "flux", "flux-kontext")

    def write(self, folder: Path, options: Options) -> None:
        """Raises `ConfigError` for options that no pipeline has."""
        is_genuine = options.size == GENUINE
        if options.vocabulary != "small" and not is_genuine:
            raise ConfigError("pipelines of Diffusers are written with a small vocabulary")
        if is_genuine and options.pipeline != GENUINE:
            raise ConfigError(f"size {GENUINE} is that of pipeline {GENUINE}, not of {options.pipeline}")
        from accelerate import init_empty_weights

        from tests.checkpoints.diffusers.pipelines import PIPELINES, genuine_qwen_image

        assert options.pipeline is not None
        logging.getLogger("diffusers").setLevel(logging.ERROR)  # it warns that there is no safety checker
        make = genuine_qwen_image if is_genuine else PIPELINES[options.pipeline]
        if options.weights == "dummy":
            with init_empty_weights():
                pipeline = make()
            _save_without_weights(pipeline, folder)
            return
        with torch.random.fork_rng():
            torch.manual_seed(options.seed)
            pipeline = make()
        pipeline.to(_DTYPES[options.dtype]).save_pretrained(folder)

    def num_parameters(self, folder: Path) -> int:
        pipeline = read_pipeline_folder(folder)
        if not pipeline.has_weights:
            from stages.diffusers.modules import empty_modules

            modules = empty_modules(pipeline).values()
            return sum(parameter.numel() for module in modules for parameter in module.parameters())
        total = 0
        for path in folder.glob("*/*.safetensors"):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    total += torch.Size(file.get_slice(name).get_shape()).numel()
        return total


def _save_without_weights(pipeline: "DiffusionPipeline", folder: Path) -> None:
    """Does what `save_pretrained` does for all but the weights."""
    from diffusers import ConfigMixin
    from transformers import PreTrainedModel

    pipeline.save_config(folder)
    for name, component in pipeline.components.items():
        if isinstance(component, PreTrainedModel):
            component.config.save_pretrained(folder / name)
        elif isinstance(component, ConfigMixin):
            component.save_config(folder / name)
        elif component is not None:
            component.save_pretrained(folder / name)
