"""Loads a Diffusers pipeline into an engine."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from omni_server.errors import ConfigError
from omni_server.protocol.diffusion_config import ComputeDtype
from stages.diffusers.family import pipeline_class
from stages.diffusers.loras import load_loras
from stages.diffusers.modules import cast_weights, empty_modules
from stages.diffusers.options import DiffusersStage
from stages.diffusers.pipeline_folder import PipelineFolder, read_pipeline_folder
from stages.diffusers.pipeline_options import apply_options


def load_pipeline(
    path: str | Path,
    stage: DiffusersStage,
    dtype: ComputeDtype,
    device: torch.device,
    *,
    random_weights: bool = False,
) -> Any:
    """Returns the pipeline with its options applied. With `random_weights`, those of the folder are not read.

    Raises `ConfigError` for a folder that must not be loaded, and for options that the pipeline does not
    have.
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
    load_loras(pipe, stage.loras)
    if stage.layerwise_casting:
        cast_weights(_networks(pipe), getattr(torch, dtype))
    pipe = pipe.to(device)
    apply_options(pipe, stage)
    return pipe


def _networks(pipe: Any) -> dict[str, torch.nn.Module]:
    """By the names of their components."""
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def random_modules(
    folder: PipelineFolder, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.nn.Module]:
    """Returns the components that have weights, by name. Weights are random, the same each time, and are made
    where they stay, so that no other memory is needed. As small as vLLM's: results are finite."""
    modules = empty_modules(folder)
    generator = torch.Generator(device).manual_seed(0)
    for module in modules.values():
        for part in module.modules():
            for name, empty in list(part.named_parameters(recurse=False)):
                weight = torch.nn.Parameter(
                    torch.empty(empty.shape, dtype=dtype, device=device), requires_grad=False
                )
                weight.uniform_(-1e-3, 1e-3, generator=generator)
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
