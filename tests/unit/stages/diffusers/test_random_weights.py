"""Folders without weights: their sizes are those of their configs, and they are served with random
weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.errors import ConfigError
from stages.diffusers import FAMILY
from stages.diffusers.images import finished_image
from stages.diffusers.loading import load_pipeline
from tests.checkpoints.write import make_demo_checkpoint
from tests.unit.stages.diffusers.tiny import CPU, Tiny, stage_options


@pytest.fixture(scope="module")
def weightless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weightless") / "pipeline"
    return make_demo_checkpoint(folder, family="diffusers", weights="dummy")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_weights_make_finite_images_and_are_the_same_each_time(weightless: Path, dtype: str) -> None:
    images = []
    for _ in range(2):
        pipe = load_pipeline(weightless, stage_options(), dtype, CPU, random_weights=True)
        assert pipe.transformer.dtype == pipe.text_encoder.dtype == pipe.vae.dtype == getattr(torch, dtype)
        model = Tiny("qwen-image", pipe, 3, {"true_cfg_scale": 4.0, "negative_prompt": "blurred"})
        (run,) = model.run([(0, model.job(0))])
        images.append(finished_image(run))
    first, second = images
    assert isinstance(first, torch.Tensor)
    assert torch.equal(first, second)


def test_random_weights_have_the_shapes_of_stored_ones(
    weightless: Path, tiny_folder: Callable[[str], Path]
) -> None:
    config = load_stage_config(find_shipped_config("diffusers.demo-cpu"))
    # transformers stores weights under other names than those of its modules.
    expected, stored = (
        sorted(FAMILY.footprints(folder, config)["image"].tensors.values())
        for folder in (weightless, tiny_folder("qwen-image"))
    )
    assert expected == stored


def test_without_weights_and_without_random_ones_nothing_is_served(weightless: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no weights.*--load-format dummy"):
        load_pipeline(weightless, stage_options(), "float32", CPU)
