"""Loads a Diffusers pipeline into an engine."""

from pathlib import Path
from typing import Any

import torch

from omni_server.errors import ConfigError
from omni_server.protocol.diffusion_config import ComputeDtype
from stages.diffusers.family import pipeline_class
from stages.diffusers.options import DiffusersStage
from stages.diffusers.pipeline_folder import read_pipeline_folder
from stages.diffusers.stepped_pipeline import DENOISERS


def load_pipeline(path: str | Path, stage: DiffusersStage, dtype: ComputeDtype, device: torch.device) -> Any:
    """Returns the pipeline with its options applied. Raises `ConfigError` for a folder that must not be loaded,
    and for options that the pipeline does not have."""
    folder = read_pipeline_folder(Path(path))
    _silence()
    pipe = pipeline_class(folder).from_pretrained(
        folder.path,
        dtype=getattr(torch, dtype),
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        variant=folder.variant,
    )
    pipe = pipe.to(device)
    if stage.vae_tiling:
        if not hasattr(pipe.vae, "enable_tiling"):
            raise ConfigError(f"vae_tiling: {type(pipe.vae).__name__} cannot decode in tiles; leave it out")
        pipe.vae.enable_tiling()
    if stage.step_cache == "first_block":
        _enable_first_block_cache(pipe, stage.step_cache_threshold)
    return pipe


def _silence() -> None:
    """Both libraries draw progress bars, and Diffusers warns of each request's harmless parameters."""
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def _enable_first_block_cache(pipe: Any, threshold: float) -> None:
    from diffusers import FirstBlockCacheConfig

    denoisers = [module for name in DENOISERS if (module := getattr(pipe, name, None)) is not None]
    for denoiser in denoisers:
        try:
            denoiser.enable_cache(FirstBlockCacheConfig(threshold=threshold))
        except (AttributeError, ValueError) as error:
            raise ConfigError(
                f"step_cache: {type(denoiser).__name__} has no first-block cache; leave it out"
            ) from error
