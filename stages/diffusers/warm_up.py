"""Runs the largest step of a pipeline before it serves: what it needs then, it has later."""

import numpy as np
import torch

from omni_server.errors import ConfigError
from omni_server.protocol.device_memory import OUTSIDE_TORCH_BYTES
from omni_server.protocol.images import PIXELS_PER_TOKEN, ImageJob, Pixels, num_image_tokens
from omni_server.transport.result import Refusal
from stages.diffusers.images import finished_image, pipeline_arguments
from stages.diffusers.options import DiffusersStage
from stages.diffusers.pipeline_run import PipelineRun
from stages.diffusers.stepped_pipeline import SteppedPipeline
from stages.runtime.memory import measured_use, start_measuring

NUM_STEPS = 2
"""Some schedules divide by zero with one."""
SIDE_MULTIPLE = 64
CHECK_TOKENS = 256
"""Of the images with which joining is tried."""
MAX_MEAN_DIFFERENCE = 0.01
"""Between an image alone and joined. Rounding in bfloat16 stays below; the pixels of another request do
not."""


def warm_up(
    pipeline: SteppedPipeline,
    stage: DiffusersStage,
    *,
    device: torch.device,
    share: int | None,
    input_tokens: int,
) -> str:
    """Returns what it found, in words. Raises `ConfigError` if the largest step fails.

    `share` is that of the device's memory, in bytes; None on a CPU. `input_tokens` are those of an image to
    edit.
    """
    found = []
    if pipeline.joins and stage.max_num_seqs > 1:
        found.append(_try_joining(pipeline, stage))
    number, side = 1, _side(stage.largest_image)
    if share is not None:  # else there is nothing to measure
        num_tokens = num_image_tokens(side, side) + input_tokens * pipeline.takes("image")
        number = max(1, min(stage.max_num_seqs, stage.max_num_batched_tokens // num_tokens))
        start_measuring(device)
    what = f"{number} image{'' if number == 1 else 's'} of {side}x{side}"
    try:
        _images(pipeline, [_job(pipeline, "a red cube", side, seed) for seed in range(number)])
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{what} do not fit the stage's share of the GPU (gpu_memory_utilization "
            f"{stage.gpu_memory_utilization:g}): raise it, or lower max_model_len or "
            "max_num_batched_tokens"
        ) from error
    pipeline.num_calls = pipeline.num_passes = 0
    if share is None:
        return "; ".join([*found, f"{what} at once"])
    resident, activations = measured_use(device)
    rest = share - OUTSIDE_TORCH_BYTES - resident - activations
    found.append(
        f"{what} at once: {share / 1e9:.1f} GB = {resident / 1e9:.1f} weights + "
        f"{activations / 1e9:.1f} activations + {OUTSIDE_TORCH_BYTES / 1e9:.1f} reserve + "
        f"{rest / 1e9:.1f} free"
    )
    return "; ".join(found)


def _try_joining(pipeline: SteppedPipeline, stage: DiffusersStage) -> str:
    """Switches joining off for a pipeline whose requests it would mix or fail."""
    side = _side(min(CHECK_TOKENS, stage.largest_image))
    prompts = ("a red cube", "two green spheres on a wooden table")
    jobs = [_job(pipeline, prompt, side, seed) for seed, prompt in enumerate(prompts)]
    alone = [_images(pipeline, [job])[0] for job in jobs]
    joined = _images(pipeline, jobs)
    if stage.compile:  # without padding and its mask, it is compiled once more
        _images(pipeline, [jobs[0], jobs[0]])
    differences = [float((a - b).abs().mean()) for a, b in zip(alone, joined, strict=True)]
    if pipeline.num_failed_joins:
        pipeline.joins = False
        return "its requests cannot be joined"
    if max(differences) > MAX_MEAN_DIFFERENCE:
        pipeline.joins = False
        return f"its requests are not joined, as that changes images by {max(differences):.2f}"
    return "requests can be joined"


def _job(pipeline: SteppedPipeline, prompt: str, side: int, seed: int) -> ImageJob:
    grey = Pixels.of(np.full((side, side, 3), 128, np.uint8))
    return ImageJob(
        prompt,
        side,
        side,
        seed,
        negative_prompt="blurred" if pipeline.takes("negative_prompt") else None,
        num_steps=NUM_STEPS,
        images=(grey,) if pipeline.takes("image") else (),
    )


def _images(pipeline: SteppedPipeline, jobs: list[ImageJob]) -> list[torch.Tensor]:
    """Raises what the pipeline raises, and `ConfigError` if its results are no images."""
    runs: list[PipelineRun] = [pipeline.start(pipeline_arguments(pipeline.pipe, job)) for job in jobs]
    while waiting := [run for run in runs if not run.is_over]:
        pipeline.step(waiting)
    return [_checked(run) for run in runs]


def _checked(run: PipelineRun) -> torch.Tensor:
    if run.error is not None:
        raise run.error
    image = finished_image(run)
    if not isinstance(image, torch.Tensor):
        reason = image.message if isinstance(image, Refusal) else image.detail
        raise ConfigError(f"the pipeline's first image failed: {reason}")
    return image


def _side(num_tokens: int) -> int:
    """Of the largest square of at most so many tokens, in pixels."""
    side = int((num_tokens * PIXELS_PER_TOKEN) ** 0.5)
    multiple = SIDE_MULTIPLE if side >= SIDE_MULTIPLE else 16
    return side // multiple * multiple
