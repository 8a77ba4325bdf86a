"""Unchanged pipelines, run in steps: their images are those that the pipeline makes by itself."""

import gc
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from omni_server.protocol.images import Pixels
from stages.diffusers.stepped_pipeline import SteppedPipeline
from tests.unit.stages.diffusers.tiny import Tiny, difference

CHEAP = ("qwen-image", "sd15", "sd3", "flux", "flux-kontext")
ALL = (*CHEAP, "qwen-image-edit")
JOINED = 1e-5
"""Sums over a batch are rounded in another order."""

GetTiny = Callable[[str], Tiny]


@pytest.mark.parametrize("name", ALL)
def test_alone_an_image_is_the_pipelines_own_to_the_last_bit(tiny: GetTiny, name: str) -> None:
    model = tiny(name)
    (run,) = model.run([(0, model.job(0))])
    assert run.error is None
    assert torch.equal(run.result.images, model.own_image(model.job(0)))
    assert run.steps_done == run.num_steps == model.num_steps


@pytest.mark.parametrize(
    ("name", "late"), [*((name, late) for name in CHEAP for late in (0, 1, 3)), ("qwen-image-edit", 1)]
)
def test_a_request_joins_another_at_any_step(tiny: GetTiny, name: str, late: int) -> None:
    model = tiny(name)
    # The same image again where each takes seconds.
    jobs = model.job(0), model.job(0 if name == "qwen-image-edit" else 1)
    passes, calls = model.stepped.num_passes, model.stepped.num_calls
    for run, job in zip(model.run([(0, jobs[0]), (late, jobs[1])]), jobs, strict=True):
        assert difference(run, model.own_image(job)) <= JOINED
    passes, calls = model.stepped.num_passes - passes, model.stepped.num_calls - calls
    assert calls / passes == 2 * model.num_steps / (model.num_steps + late)


@pytest.mark.parametrize("name", CHEAP)
def test_requests_of_other_sizes_steps_and_guidance_run_side_by_side(tiny: GetTiny, name: str) -> None:
    model = tiny(name)
    unguided = dict.fromkeys(model.guidance) | ({"guidance_scale": 0.0} if name != "qwen-image" else {})
    jobs = [model.job(0), model.job(1, height=96), model.job(2, num_steps=6), model.job(3, **unguided)]
    for run, job in zip(model.run([(0, job) for job in jobs]), jobs, strict=True):
        assert difference(run, model.own_image(job)) <= JOINED
        assert run.result.images.shape[2:] == (job.height, job.width)


@pytest.mark.parametrize("name", CHEAP)
def test_a_request_aborted_at_any_step_ends_alone_and_leaves_no_thread(tiny: GetTiny, name: str) -> None:
    model = tiny(name)
    before = threading.active_count()
    for num_steps in range(model.num_steps + 1):  # the last is between the last step and decoding
        aborted, other = model.start(model.job(0)), model.start(model.job(1))
        for _ in range(num_steps):
            model.stepped.step([aborted, other])
        model.stepped.abort(aborted)
        assert aborted.is_over
        assert (aborted.result, aborted.error) == (None, None)
        while not other.is_over:
            model.stepped.step([other])
        assert difference(other, model.own_image(model.job(1))) <= JOINED
    assert threading.active_count() == before


@pytest.mark.parametrize("end", ["finished", "aborted", "failed"])
def test_a_request_that_is_over_needs_no_garbage_collector_to_be_freed(tiny: GetTiny, end: str) -> None:
    """It holds tensors on the device."""
    model = tiny("flux")
    gc.disable()
    try:
        run = model.start(model.job(0, num_steps=0 if end == "failed" else 2))
        model.stepped.step([run])
        if end == "aborted":
            model.stepped.abort(run)
        while not run.is_over:
            model.stepped.step([run])
        run.error = None  # its traceback refers to the run
        held = weakref.ref(run)
        del run
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
def test_a_schedule_that_divides_by_zero_is_refused_before_the_denoiser(tiny: GetTiny) -> None:
    model = tiny("qwen-image")
    bad, good = model.run([(0, model.job(0, num_steps=1)), (0, model.job(1))])
    assert isinstance(bad.error, ValueError)
    assert str(bad.error) == "FlowMatchEulerDiscreteScheduler has no schedule of 1 steps"
    assert not bad.has_called_denoiser
    assert difference(good, model.own_image(model.job(1))) <= JOINED


def test_an_image_to_edit_that_the_processor_finds_too_long_is_refused_before_the_denoiser(
    tiny: GetTiny,
) -> None:
    model = tiny("qwen-image-edit")
    (run,) = model.run([(0, model.job(0, images=(Pixels.of(np.zeros((3000, 16, 3), np.uint8)),)))])
    assert isinstance(run.error, ValueError)
    assert "aspect ratio" in str(run.error)
    assert not run.has_called_denoiser


def test_a_request_that_fails_in_the_denoiser_fails_alone(
    tiny: GetTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("sd3")
    expected = model.own_image(model.job(1))
    block = model.pipe.transformer.proj_out
    forward = block.forward

    def failing(states: torch.Tensor) -> torch.Tensor:
        if not torch.isfinite(states).all():
            raise RuntimeError("a kernel has failed")
        return forward(states)

    monkeypatch.setattr(block, "forward", failing)
    good = model.start(model.job(1))
    bad = model.start(model.job(0))
    bad.arguments["latents"] = torch.full((1, 4, 8, 8), torch.nan)
    while not (good.is_over and bad.is_over):
        model.stepped.step([run for run in (good, bad) if not run.is_over])
    assert str(bad.error) == "a kernel has failed"
    assert difference(good, expected) <= JOINED


def test_a_pipeline_whose_requests_are_not_to_be_joined_runs_them_one_by_one(tiny: GetTiny) -> None:
    model = tiny("flux")
    model.stepped.joins = False
    try:
        calls = model.stepped.num_calls, model.stepped.num_passes
        runs = model.run([(0, model.job(0)), (0, model.job(1))])
        assert model.stepped.num_calls - calls[0] == model.stepped.num_passes - calls[1]
        for run, index in zip(runs, (0, 1), strict=True):
            assert torch.equal(run.result.images, model.own_image(model.job(index)))
    finally:
        model.stepped.joins = True


@pytest.mark.parametrize("name", CHEAP)
def test_previews_come_closer_to_the_image_and_do_not_change_it(tiny: GetTiny, name: str) -> None:
    model = tiny(name)
    expected = model.own_image(model.job(0))
    run, distances = model.start(model.job(0)), []
    while not run.is_over:
        model.stepped.step([run])
        if not run.is_over:
            distances.append(float((model.stepped.preview(run).images - expected).abs().mean()))
    assert len(distances) == model.num_steps
    assert distances[-2] < distances[0]
    assert distances[-1] < 1e-3
    assert torch.equal(run.result.images, expected)


def test_a_pipeline_without_a_denoiser_is_refused(tiny: GetTiny) -> None:
    class Upscaler:
        def set_progress_bar_config(self, **config: bool) -> None: ...

    with pytest.raises(ValueError, match="Upscaler has no transformer"):
        SteppedPipeline(Upscaler())
