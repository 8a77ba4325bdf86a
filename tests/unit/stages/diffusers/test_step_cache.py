"""A step cache per request: interleaved requests get what each gets alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from omni_server.errors import ConfigError
from stages.diffusers.loading import load_pipeline
from tests.unit.stages.diffusers.tiny import CPU, Tiny, stage_options

CACHED = {"step_cache": "first_block", "step_cache_threshold": 0.6}


@pytest.fixture
def cached(tiny: Callable[[str], Tiny], tiny_folder: Callable[[str], Path]) -> Tiny:
    plain = tiny("qwen-image")
    pipe = load_pipeline(tiny_folder("qwen-image"), stage_options(**CACHED), "float32", CPU)
    return Tiny(plain.name, pipe, 8, plain.guidance)


def test_interleaved_requests_get_what_each_gets_alone(cached: Tiny, tiny: Callable[[str], Tiny]) -> None:
    jobs = [cached.job(0), cached.job(1, height=96)]
    alone = [cached.own_image(job) for job in jobs]
    uncached = tiny("qwen-image").own_image(jobs[0])
    assert not torch.equal(alone[0], uncached)  # some steps were skipped
    for run, expected in zip(cached.run([(0, jobs[0]), (1, jobs[1])]), alone, strict=True):
        assert run.error is None
        assert torch.equal(run.result.images, expected)
    assert cached.stepped.num_calls == cached.stepped.num_passes  # none was joined


def test_the_cache_of_a_request_goes_with_it(cached: Tiny) -> None:
    (cache,) = cached.stepped.step_caches
    ended, aborted = cached.start(cached.job(0, num_steps=2)), cached.start(cached.job(1))
    for _ in range(3):
        cached.stepped.step([run for run in (ended, aborted) if not run.is_over])
    assert ended.is_over
    left = cache.num_states
    assert left > 0
    cached.stepped.abort(aborted)
    assert cache.num_states == 0


def test_a_denoiser_without_such_a_cache_is_refused(tiny_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="step_cache: UNet2DConditionModel has no first-block cache"):
        load_pipeline(tiny_folder("sd15"), stage_options(**CACHED), "float32", CPU)


def test_vae_tiling_is_passed_on(tiny_folder: Callable[[str], Path]) -> None:
    pipe = load_pipeline(tiny_folder("sd3"), stage_options(vae_tiling=True), "float32", CPU)
    assert pipe.vae.use_tiling
