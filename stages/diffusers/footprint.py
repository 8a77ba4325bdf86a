"""The memory of a Diffusers pipeline, by the headers of its weights, or by its configs if it has none."""

from pathlib import Path
from typing import Literal

from omni_server.config.checkpoint_files import read_tensors
from omni_server.config.stage_config import StageConfig
from omni_server.family.footprint import StageFootprint
from omni_server.protocol.images import PIXELS_PER_TOKEN
from stages.diffusers.options import DiffusersStage
from stages.diffusers.pipeline_folder import PipelineFolder

WIDE_LAYERS = 12
"""Estimate: the values that decoding holds at the same time, in tensors of the image's size with as many
channels as the decoder's first block. Denoising needs less per token."""
DEFAULT_CHANNELS = 128
"""Of decoders that do not say how wide they are; Stable Diffusion's width."""


def stage_footprints(folder: PipelineFolder, config: StageConfig) -> dict[str, StageFootprint]:
    tensors = _stored_tensors(folder) if folder.has_weights else _expected_tensors(folder)
    return {
        name: StageFootprint(
            tensors=tensors,
            dtype="bfloat16" if config.platform == "cuda" else "float32",
            values_per_token=WIDE_LAYERS * PIXELS_PER_TOKEN * _channels(folder),
            weight_bytes=_changed_weight_bytes(folder, stage, config.platform),
        )
        for name, stage in config.stages.items()
        if isinstance(stage, DiffusersStage)
    }


def _changed_weight_bytes(
    folder: PipelineFolder, stage: DiffusersStage, platform: Literal["cpu", "cuda"]
) -> int | None:
    """Of a pipeline with float8 weights or adapters; None without. Adapters that are not downloaded yet are
    left out."""
    if not (stage.layerwise_casting or stage.loras):
        return None
    import torch

    from stages.diffusers.modules import STORED, cast_weights, empty_modules

    dtype = getattr(torch, stage.compute_dtype(platform))
    modules = empty_modules(folder)
    if stage.layerwise_casting:
        cast_weights(modules, dtype)
    weights = sum(
        parameter.numel() * (STORED if parameter.dtype == STORED else dtype).itemsize
        for module in modules.values()
        for parameter in module.parameters()
    )
    adapters = [Path(place).expanduser() for place in stage.loras.values()]
    return weights + sum(file.stat().st_size for file in adapters if file.is_file())


def _stored_tensors(folder: PipelineFolder) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {}
    for path in folder.weight_files():
        tensors |= {f"{path.parent.name}/{name}": tensor.shape for name, tensor in read_tensors(path).items()}
    return tensors


def _expected_tensors(folder: PipelineFolder) -> dict[str, tuple[int, ...]]:
    from stages.diffusers.modules import empty_modules

    return {
        f"{component}/{name}": tuple(parameter.shape)
        for component, module in empty_modules(folder).items()
        for name, parameter in module.named_parameters()
    }


def _channels(folder: PipelineFolder) -> int:
    """At the decoder's full resolution."""
    config = folder.config_of("vae")
    widths = config.get("block_out_channels")
    width = widths[0] if isinstance(widths, list) and widths else config.get("base_dim")
    return width if isinstance(width, int) else DEFAULT_CHANNELS
