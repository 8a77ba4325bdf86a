"""The family of Diffusers pipelines with a Qwen-Image that fails, waits and counts when it is told to. Named
by the stage config of these tests alone."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from omni_server.config.pipeline import Pipeline
from stages.diffusers.family import DiffusersFamily
from stages.diffusers.pipeline_worker import PipelineWorker
from tests.faults.failing_models import MESSAGE, do_as_told
from tests.faults.orders import FOLDER_VARIABLE, wait_while_starts_are_held

PHASES = {
    "Qwen2_5_VLForConditionalGeneration": "encode",
    "AdaLayerNormContinuous": "denoise",  # once in each pass
    "QwenImageDecoder3d": "decode",
}
"""What is computed when a module of this class is called."""

ERRORS = {error.__name__: error for error in (RuntimeError, ValueError)}


class FailingWorker(PipelineWorker):
    def init_device(self) -> None:
        wait_while_starts_are_held()
        register_module_forward_pre_hook(_before_forward)
        super().init_device()


def _before_forward(module: torch.nn.Module, _: Any) -> None:
    phase = PHASES.get(type(module).__name__)
    if phase is None:
        return
    do_as_told(phase)
    folder = Path(os.environ[FOLDER_VARIABLE])
    refuse, count = folder / f"{phase}.refuse", folder / f"{phase}.count"
    if count.exists():
        with count.open("ab") as file:
            file.write(b".")
    if refuse.exists():
        error = ERRORS[refuse.read_text()]
        refuse.unlink()
        raise error(MESSAGE)


class FailingDiffusers(DiffusersFamily):
    _image = DiffusersFamily.pipeline.stages["image"]
    assert _image.stepwise is not None
    pipeline = Pipeline(
        {
            "image": replace(
                _image, stepwise=replace(_image.stepwise, worker=f"{__name__}.{FailingWorker.__name__}")
            )
        }
    )


FAMILY = FailingDiffusers()
