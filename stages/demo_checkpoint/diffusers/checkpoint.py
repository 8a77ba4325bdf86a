"""Writes a tiny Diffusers pipeline in the layout of a published one."""

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import safe_open

from omni_server.errors import ConfigError
from stages.demo_checkpoint.options import Options

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class DiffusersCheckpoints:
    """Implements `stages.demo_checkpoint.options.DemoFamily`. Diffusers is imported when one is written."""

    sizes: tuple[str, ...] = ("tiny",)
    genuine_sizes: Mapping[str, int] = MappingProxyType({})
    pipelines: tuple[str, ...] = ("qwen-image", "qwen-image-edit", "sd15", "sd3", "flux")

    def write(self, folder: Path, options: Options) -> None:
        """Raises `ConfigError` without Diffusers, and for options that no pipeline has."""
        if options.weights != "random" or options.vocabulary != "small":
            raise ConfigError("pipelines of Diffusers are written with random weights and a small vocabulary")
        try:
            from stages.demo_checkpoint.diffusers.pipelines import PIPELINES
        except ImportError as error:
            raise ConfigError(f"diffusers is not installed ({error}): install omni-server[images]") from error
        assert options.pipeline is not None
        logging.getLogger("diffusers").setLevel(logging.ERROR)  # it warns that there is no safety checker
        with torch.random.fork_rng():
            torch.manual_seed(options.seed)
            pipeline = PIPELINES[options.pipeline]()
        pipeline.to(_DTYPES[options.dtype]).save_pretrained(folder)

    def num_parameters(self, folder: Path) -> int:
        total = 0
        for path in folder.glob("*/*.safetensors"):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    total += torch.Size(file.get_slice(name).get_shape()).numel()
        return total
