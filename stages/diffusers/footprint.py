"""The memory of a Diffusers pipeline, by the headers of its weights, or by its configs if it has none."""

from omni_server.config.stage_config import StageConfig
from omni_server.family import StageFootprint
from omni_server.protocol.images import PIXELS_PER_TOKEN
from stages.diffusers.pipeline_folder import PipelineFolder

WIDE_LAYERS = 12
"""Estimate: the values that decoding holds at the same time, in tensors of the image's size with as many channels
as the decoder's first block. Denoising needs less per token."""
DEFAULT_CHANNELS = 128
"""Of decoders that do not say how wide they are; Stable Diffusion's width."""


def stage_footprints(folder: PipelineFolder, config: StageConfig) -> dict[str, StageFootprint]:
    tensors = _stored_tensors(folder) if folder.has_weights else _expected_tensors(folder)
    return {
        name: StageFootprint(
            tensors=tensors,
            dtype="bfloat16" if config.platform == "cuda" else "float32",
            loads_float32=False,
            encodes_media=False,
            kv=None,
            values_per_token=WIDE_LAYERS * PIXELS_PER_TOKEN * _channels(folder),
        )
        for name in config.stages
    }


def _stored_tensors(folder: PipelineFolder) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    tensors: dict[str, tuple[int, ...]] = {}
    for path in folder.weight_files():
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensors[f"{path.parent.name}/{name}"] = tuple(file.get_slice(name).get_shape())
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
