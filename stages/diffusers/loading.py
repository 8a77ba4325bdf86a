"""Loads a Diffusers pipeline into an engine."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

from omni_server.errors import ConfigError
from omni_server.protocol.diffusion_config import ComputeDtype
from stages.diffusers.family import pipeline_class
from stages.diffusers.loras import load_loras
from stages.diffusers.modules import empty_modules
from stages.diffusers.options import DiffusersStage
from stages.diffusers.pipeline_folder import PipelineFolder, read_pipeline_folder
from stages.diffusers.stepped_pipeline import denoisers_of


def load_pipeline(
    path: str | Path,
    stage: DiffusersStage,
    dtype: ComputeDtype,
    device: torch.device,
    *,
    random_weights: bool = False,
) -> Any:
    """Returns the pipeline with its options applied. With `random_weights`, those of the folder are not read.

    Raises `ConfigError` for a folder that must not be loaded, and for options that the pipeline does not have.
    """
    folder = read_pipeline_folder(Path(path))
    if not (random_weights or folder.has_weights):
        raise ConfigError(
            f"{folder.path} has no weights (*.safetensors): download them, or serve random ones with "
            "--load-format dummy"
        )
    _silence()
    modules = random_modules(folder, getattr(torch, dtype), device) if random_weights else {}
    pipe = pipeline_class(folder).from_pretrained(
        folder.path,
        dtype=getattr(torch, dtype),
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        variant=folder.variant,
        **modules,
    )
    pipe = pipe.to(device)
    load_loras(pipe, stage.loras)
    if stage.vae_tiling:
        if not hasattr(pipe.vae, "enable_tiling"):
            raise ConfigError(f"vae_tiling: {type(pipe.vae).__name__} cannot decode in tiles; leave it out")
        pipe.vae.enable_tiling()
    if stage.step_cache == "first_block":
        _enable_first_block_cache(pipe, stage.step_cache_threshold)
    if stage.compile:
        _compile(pipe)
    return pipe


def random_modules(
    folder: PipelineFolder, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.nn.Module]:
    """Returns the components that have weights, by name. Weights are vLLM's random ones, the same each time,
    and are made where they stay, so that no other memory is needed."""
    modules = empty_modules(folder)
    for module in modules.values():
        for part in module.modules():
            for name, empty in list(part.named_parameters(recurse=False)):
                weight = torch.nn.Parameter(
                    torch.empty(empty.shape, dtype=dtype, device=device), requires_grad=False
                )
                initialize_single_dummy_weight(weight)
                setattr(part, name, weight)
        if isinstance(module, PreTrainedModel):
            module.tie_weights()
        module.to(device)  # what is left: buffers
    return modules


def _silence() -> None:
    """Both libraries draw progress bars, and Diffusers warns of each request's harmless parameters."""
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


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
    for denoiser in denoisers_of(pipe):
        try:
            # One kernel for all sizes: compiling takes longer than a step may, so it is done before serving.
            denoiser.compile_repeated_blocks(dynamic=True)
        except ValueError as error:
            raise ConfigError(
                f"compile: {type(denoiser).__name__} does not say which of its blocks are repeated; leave it out"
            ) from error
