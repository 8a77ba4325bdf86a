"""Applies Diffusers' own means of speed and memory to a pipeline, as the stage config asks for them."""

import os
from typing import Any

from omni_server.errors import ConfigError
from stages.diffusers.options import AttentionBackend, DiffusersStage
from stages.diffusers.stepped_pipeline import denoisers_of


def apply_options(pipe: Any, stage: DiffusersStage) -> None:
    """Raises `ConfigError` for options that the pipeline does not have."""
    if stage.vae_tiling:
        if not hasattr(pipe.vae, "enable_tiling"):
            raise ConfigError(f"vae_tiling: {type(pipe.vae).__name__} cannot decode in tiles; leave it out")
        pipe.vae.enable_tiling()
    if stage.attention_backend is not None:
        _set_attention_backend(pipe, stage.attention_backend)
    if stage.step_cache == "first_block":
        _enable_first_block_cache(pipe, stage.step_cache_threshold)
    if stage.compile:
        _compile(pipe)


def _set_attention_backend(pipe: Any, backend: AttentionBackend) -> None:
    for denoiser in denoisers_of(pipe):
        if not any(
            hasattr(processor, "_attention_backend") for processor in denoiser.attn_processors.values()
        ):
            raise ConfigError(
                f"attention_backend: {type(denoiser).__name__} has the one of torch only; leave it out"
            )
        try:
            denoiser.set_attention_backend(backend)
        except (RuntimeError, ValueError, ImportError) as error:
            raise ConfigError(
                f"attention_backend: {backend} cannot be used here: {' '.join(str(error).split())}"
            ) from error


def _enable_first_block_cache(pipe: Any, threshold: float) -> None:
    from diffusers import FirstBlockCacheConfig

    for denoiser in denoisers_of(pipe):
        try:
            denoiser.enable_cache(FirstBlockCacheConfig(threshold=threshold))
        except (AttributeError, ValueError) as error:
            raise ConfigError(
                f"step_cache: {type(denoiser).__name__} has no first-block cache; leave it out"
            ) from error


def _compile(pipe: Any) -> None:
    # The server sets this on CPUs where vLLM compiles no model. torch would compile nothing, and not say so.
    os.environ["TORCHDYNAMO_DISABLE"] = "0"
    for denoiser in denoisers_of(pipe):
        try:
            # One kernel for all sizes: compiling takes longer than a step may, so it is done before serving.
            denoiser.compile_repeated_blocks(dynamic=True)
        except ValueError as error:
            raise ConfigError(
                f"compile: {type(denoiser).__name__} does not say which of its blocks are repeated; leave it out"
            ) from error
