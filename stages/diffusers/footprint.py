"""The memory of a Diffusers pipeline, by the headers of its weights."""

from omni_server.config.stage_config import StageConfig
from omni_server.family import StageFootprint
from stages.diffusers.pipeline_folder import PipelineFolder

VALUES_PER_TOKEN = 400_000
"""Estimate for decoding an image: of 16 x 16 pixels, six times 256 channels at full resolution. The denoiser's
pass needs less per token."""


def stage_footprints(folder: PipelineFolder, config: StageConfig) -> dict[str, StageFootprint]:
    from safetensors import safe_open

    tensors: dict[str, tuple[int, ...]] = {}
    for path in folder.weight_files():
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensors[f"{path.parent.name}/{name}"] = tuple(file.get_slice(name).get_shape())
    return {
        name: StageFootprint(
            tensors=tensors,
            dtype="bfloat16" if config.platform == "cuda" else "float32",
            loads_float32=False,
            encodes_media=False,
            kv=None,
            values_per_token=VALUES_PER_TOKEN,
        )
        for name in config.stages
    }
