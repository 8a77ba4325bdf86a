"""What a pipeline is tried with before it serves."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from omni_server.errors import ConfigError
from stages.diffusers import warm_up as module
from tests.unit.stages.diffusers.tiny import CPU, Tiny, stage_options


@pytest.fixture
def model(tiny: Callable[[str], Tiny]) -> Iterator[Tiny]:
    model = tiny("flux")
    yield model
    model.stepped.joins = True
    model.stepped.num_failed_joins = 0


def warm_up(model: Tiny) -> str:
    stage = stage_options(max_model_len=64)
    return module.warm_up(model.stepped, stage, device=CPU, share=None, input_tokens=0)


def test_the_largest_image_is_made_and_requests_are_joined(model: Tiny) -> None:
    assert warm_up(model) == "requests can be joined; 1 image of 128x128 at once"
    assert model.stepped.joins
    assert (model.stepped.num_calls, model.stepped.num_passes) == (0, 0)


def replace_denoiser(monkeypatch: pytest.MonkeyPatch, model: Tiny, result: Callable[[Any], Any]) -> None:
    """`result` changes what the denoiser's last layer returns."""
    layer = model.pipe.transformer.proj_out
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda states: result(forward(states)))


def test_requests_that_a_denoiser_mixes_are_not_joined(model: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_denoiser(monkeypatch, model, lambda states: states.mean(0, keepdim=True).expand_as(states))
    assert "its requests are not joined, as that changes images by" in warm_up(model)
    assert not model.stepped.joins


def test_requests_that_a_denoiser_refuses_together_are_not_joined(
    model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_by_one(states: torch.Tensor) -> torch.Tensor:
        if len(states) > 1:
            raise RuntimeError("a batch of one only")
        return states

    replace_denoiser(monkeypatch, model, one_by_one)
    assert "its requests cannot be joined" in warm_up(model)
    assert not model.stepped.joins


def test_a_pipeline_that_returns_no_image_does_not_start(
    model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_denoiser(monkeypatch, model, lambda states: states * torch.inf)
    with pytest.raises(ConfigError, match="the pipeline's first image failed: latents that are NaN"):
        warm_up(model)
