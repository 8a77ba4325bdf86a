"""What a request becomes for a pipeline, and what its result becomes: an image, or the request's error."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from omni_server.protocol.corruption import Corruption
from omni_server.protocol.images import ImageJob, Pixels
from omni_server.transport.result import Refusal
from stages.diffusers.images import finished_image, pipeline_arguments, preview_steps
from stages.diffusers.pipeline_run import PipelineRun
from tests.unit.stages.diffusers.tiny import PHOTO, Tiny

GetTiny = Callable[[str], Tiny]


def run_with_latents(model: Tiny, value: float) -> PipelineRun:
    run = model.start(model.job(0))
    run.arguments["latents"] = torch.full((1, 4, 8, 8), value)
    while not run.is_over:
        model.stepped.step([run])
    return run


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_result_that_is_not_finite_is_an_error_and_no_black_image(tiny: GetTiny, value: float) -> None:
    found = finished_image(run_with_latents(tiny("sd3"), value))
    assert isinstance(found, Corruption)
    assert found.kind == "samples"


def test_a_decoder_that_returns_nan_is_an_error(tiny: GetTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("sd3")
    monkeypatch.setattr(model.pipe.vae.decoder.conv_out.bias, "data", torch.full((3,), torch.nan))
    (run,) = model.run([(0, model.job(0))])
    found = finished_image(run)
    assert isinstance(found, Corruption)
    assert (found.kind, "pixels" in found.detail) == ("samples", True)


def test_an_image_that_the_safety_checker_blackened_is_refused(tiny: GetTiny) -> None:
    model = tiny("sd15")
    (run,) = model.run([(0, model.job(0))])
    run.result = SimpleNamespace(images=run.result.images * 0, nsfw_content_detected=[True])
    rejected = Refusal("moderation_blocked", "the model's safety checker rejected the image")
    assert finished_image(run) == rejected


def test_parameters_that_are_not_given_are_the_pipelines_own(tiny: GetTiny) -> None:
    arguments = pipeline_arguments(tiny("qwen-image").pipe, ImageJob("a cat", 64, 32, 7))
    generator = arguments.pop("generator")
    assert arguments == {
        "prompt": "a cat",
        "width": 64,
        "height": 32,
        "num_inference_steps": 50,
        "output_type": "pt",
    }
    assert (generator.device.type, generator.initial_seed()) == ("cpu", 7)


def test_images_to_edit_reach_the_pipeline_unchanged(tiny: GetTiny) -> None:
    pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    one, other = Pixels.of(pixels), Pixels.of(pixels[::-1])
    pipe = tiny("qwen-image").pipe
    image = pipeline_arguments(pipe, ImageJob("x", 64, 64, 0, images=(one,)))["image"]
    assert isinstance(image, Image.Image)
    np.testing.assert_array_equal(np.asarray(image), pixels)
    both = pipeline_arguments(pipe, ImageJob("x", 64, 64, 0, images=(one, other)))["image"]
    assert [np.asarray(image).tolist() for image in both] == [pixels.tolist(), pixels[::-1].tolist()]


def test_a_pipeline_that_scales_sizes_to_an_area_keeps_that_of_the_request(tiny: GetTiny) -> None:
    model = tiny("flux-kontext")
    (run,) = model.run([(0, model.job(0, height=96, num_steps=1, images=(PHOTO,)))])
    assert run.error is None
    assert run.result.images.shape == (1, 3, 96, 64)


@pytest.mark.parametrize(
    ("num_steps", "num_previews", "steps"),
    [(8, 0, []), (8, 1, [4]), (8, 3, [2, 4, 6]), (3, 3, [1, 2]), (1, 2, []), (50, 2, [17, 33])],
)
def test_previews_divide_the_steps(num_steps: int, num_previews: int, steps: list[int]) -> None:
    assert preview_steps({"num_inference_steps": num_steps}, num_previews) == steps
