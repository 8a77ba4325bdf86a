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


class WarmUp:
    def __init__(
        self,
        pipeline: SteppedPipeline,
        stage: DiffusersStage,
        *,
        device: torch.device,
        share: int | None,
        input_tokens: int,
    ) -> None:
        """`share` is that of the device's memory, in bytes; None on a CPU. `input_tokens` are those of an
        image to edit."""
        self._pipeline = pipeline
        self._stage = stage
        self._device = device
        self._share = share
        self._input_tokens = input_tokens

    def run(self) -> str:
        """Returns what it found, in words. Raises `ConfigError` if the largest step fails."""
        found = []
        if self._pipeline.joins and self._stage.max_num_seqs > 1:
            found.append(self._try_joining())
        found.append(self._largest_step())
        self._pipeline.num_calls = self._pipeline.num_passes = 0
        return "; ".join(found)

    def _try_joining(self) -> str:
        """Switches joining off for a pipeline whose requests it would mix or fail."""
        side = _side(min(CHECK_TOKENS, self._stage.largest_image))
        prompts = ("a red cube", "two green spheres on a wooden table")
        jobs = [self._job(prompt, side, seed) for seed, prompt in enumerate(prompts)]
        alone = [self._images([job])[0] for job in jobs]
        joined = self._images(jobs)
        if self._stage.compile:  # without padding and its mask, it is compiled once more
            self._images([jobs[0], jobs[0]])
        differences = [float((a - b).abs().mean()) for a, b in zip(alone, joined, strict=True)]
        if self._pipeline.num_failed_joins:
            self._pipeline.joins = False
            return "its requests cannot be joined"
        if max(differences) > MAX_MEAN_DIFFERENCE:
            self._pipeline.joins = False
            return f"its requests are not joined, as that changes images by {max(differences):.2f}"
        return "requests can be joined"

    def _largest_step(self) -> str:
        stage = self._stage
        side = _side(stage.largest_image)
        number = 1
        if self._share is not None:  # else there is nothing to measure
            num_tokens = num_image_tokens(side, side) + self._input_tokens * self._pipeline.takes("image")
            number = max(1, min(stage.max_num_seqs, stage.max_num_batched_tokens // num_tokens))
        what = f"{number} image{'' if number == 1 else 's'} of {side}x{side}"
        if self._share is not None:
            start_measuring(self._device)
        try:
            self._images([self._job("a red cube", side, seed) for seed in range(number)])
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{what} do not fit the stage's share of the GPU (gpu_memory_utilization "
                f"{stage.gpu_memory_utilization:g}): raise it, or lower max_model_len or "
                "max_num_batched_tokens"
            ) from error
        if self._share is None:
            return f"{what} at once"
        resident, activations = measured_use(self._device)
        rest = self._share - OUTSIDE_TORCH_BYTES - resident - activations
        return (
            f"{what} at once: {self._share / 1e9:.1f} GB = {resident / 1e9:.1f} weights + "
            f"{activations / 1e9:.1f} activations + {OUTSIDE_TORCH_BYTES / 1e9:.1f} reserve + "
            f"{rest / 1e9:.1f} free"
        )

    def _job(self, prompt: str, side: int, seed: int) -> ImageJob:
        grey = Pixels.of(np.full((side, side, 3), 128, np.uint8))
        takes_images = self._pipeline.takes("image")
        takes_negatives = self._pipeline.takes("negative_prompt")
        return ImageJob(
            prompt,
            side,
            side,
            seed,
            negative_prompt="blurred" if takes_negatives else None,
            num_steps=NUM_STEPS,
            images=(grey,) if takes_images else (),
        )

    def _images(self, jobs: list[ImageJob]) -> list[torch.Tensor]:
        """Raises what the pipeline raises, and `ConfigError` if its results are no images."""
        pipeline = self._pipeline
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
