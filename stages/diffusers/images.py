"""Between what a request says and what a pipeline takes, and between a pipeline's result and an image."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image

from omni_server.protocol.corruption import Corruption
from omni_server.protocol.images import ImageJob, Pixels
from omni_server.transport.result import Refusal
from stages.diffusers.family import NUM_STEPS, PARAMETERS
from stages.diffusers.pipeline_run import PipelineRun


def pipeline_arguments(pipe: Any, job: ImageJob) -> dict[str, Any]:
    """Returns the arguments of the pipeline's `__call__`. Raises `ValueError` for images that are damaged.

    The noise is drawn on the CPU, because other devices' generators give other images."""
    parameters = inspect.signature(type(pipe).__call__).parameters
    given = {name: getattr(job, field) for name, field in PARAMETERS.items()}
    arguments: dict[str, Any] = {
        "prompt": job.prompt,
        "width": job.width,
        "height": job.height,
        "generator": torch.Generator().manual_seed(job.seed),
        "output_type": "pt",
    }
    arguments |= {name: value for name, value in given.items() if value is not None}
    if job.images:
        images = [Image.fromarray(image.array()) for image in job.images]
        arguments["image"] = images[0] if len(images) == 1 else images
    if "max_area" in parameters:
        # FLUX.1 Kontext scales each size to this area. Its default is that of the published model.
        arguments["max_area"] = job.width * job.height
    # The number of steps decides when previews are due, also where it is the pipeline's own.
    if NUM_STEPS not in arguments and isinstance(parameters[NUM_STEPS].default, int):
        arguments[NUM_STEPS] = parameters[NUM_STEPS].default
    return arguments


def preview_steps(arguments: Mapping[str, Any], num_previews: int) -> list[int]:
    """Steps after which previews are due: they divide the steps into equal parts, and none is the last."""
    num_steps = int(arguments.get(NUM_STEPS, 0))
    steps = {round(num_steps * index / (num_previews + 1)) for index in range(1, num_previews + 1)}
    return sorted(step for step in steps if 0 < step < num_steps)


def finished_image(run: PipelineRun) -> torch.Tensor | Corruption | Refusal:
    """Returns the image, float32 `[height, width, 3]` in [0, 1], or why there is none."""
    # Decoding clips infinite values, so the latents show what the pixels do not.
    if run.latents is not None and not torch.isfinite(run.latents).all():
        return Corruption("samples", "latents that are NaN or infinite after the last step")
    refused = getattr(run.result, "nsfw_content_detected", None)
    if refused and any(refused):
        return Refusal("moderation_blocked", "the model's safety checker rejected the image")
    return _image(run.result)


def preview_pixels(result: Any) -> Pixels:
    """Raises `ValueError` if the result is no image."""
    image = _image(result)
    if not isinstance(image, torch.Tensor):
        raise ValueError(image.detail)
    return Pixels.of(np.rint(255 * image.clamp(0, 1).numpy()).astype(np.uint8))


def _image(result: Any) -> torch.Tensor | Corruption:
    images = result.images
    if not isinstance(images, torch.Tensor) or images.ndim != 4 or images.shape[:2] != (1, 3):
        what = list(images.shape) if isinstance(images, torch.Tensor) else type(images).__name__
        return Corruption("shape", f"the pipeline's result is {what}, not one RGB image")
    image = images[0].permute(1, 2, 0).float().cpu().contiguous()
    if not torch.isfinite(image).all():
        return Corruption("samples", "pixels that are NaN or infinite")
    return image
