"""One tiny pipeline, as the tests run it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline

from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.config.stage_config import StageConfig
from omni_server.protocol.images import ImageJob, Pixels
from stages.diffusers.images import pipeline_arguments
from stages.diffusers.options import DiffusersStage
from stages.diffusers.pipeline_run import PipelineRun
from stages.diffusers.stepped_pipeline import SteppedPipeline

PROMPTS = ("a red cube", "two green spheres on a table", "x")
CPU = torch.device("cpu")
PHOTO = Pixels.of(np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8))


def stage_options(**options: Any) -> DiffusersStage:
    return DiffusersStage.model_validate(
        {"engine": "diffusion", "model_stage": "image", "max_model_len": 1024} | options
    )


def config_with(**options: Any) -> StageConfig:
    """The shipped config for tiny pipelines, with options of the stage."""
    config = load_stage_config(find_shipped_config("diffusers.demo-cpu"))
    return config.model_copy(update={"stages": {"image": stage_options(**options)}})


@dataclass
class Tiny:
    """One pipeline, and the images that it makes by itself."""

    name: str
    pipe: DiffusionPipeline
    num_steps: int
    guidance: dict[str, Any]
    images: tuple[Pixels, ...] = ()
    stepped: SteppedPipeline = field(init=False)

    def __post_init__(self) -> None:
        self.own_image = cache(self._own_image)
        self.stepped = SteppedPipeline(self.pipe)

    def job(self, index: int, **changes: Any) -> ImageJob:
        """A request that depends on its number."""
        given = {"num_steps": self.num_steps, "images": self.images} | self.guidance
        return ImageJob(
            PROMPTS[index % len(PROMPTS)], **({"width": 64, "height": 64, "seed": index} | given | changes)
        )

    def _own_image(self, job: ImageJob) -> torch.Tensor:
        """What the pipeline returns if it is called as Diffusers documents it."""
        images: torch.Tensor = self.pipe(**pipeline_arguments(self.pipe, job)).images
        return images

    def start(self, job: ImageJob) -> PipelineRun:
        return self.stepped.start(pipeline_arguments(self.pipe, job), job.loras)

    def run(self, starts: Sequence[tuple[int, ImageJob]]) -> list[PipelineRun]:
        """Runs each job from the given step of the engine on, side by side, to their ends."""
        runs = [(step, self.start(job)) for step, job in starts]
        number = 0
        while any(not run.is_over for _, run in runs):
            self.stepped.step([run for step, run in runs if step <= number and not run.is_over])
            number += 1
        return [run for _, run in runs]


def difference(run: PipelineRun, expected: torch.Tensor) -> float:
    assert run.error is None, run.error
    return float((run.result.images - expected).abs().max())
