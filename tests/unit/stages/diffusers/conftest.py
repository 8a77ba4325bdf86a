"""Tiny pipelines of six structures, each made and loaded once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from stages.diffusers.loading import load_pipeline
from tests.checkpoints.write import make_demo_checkpoint
from tests.unit.stages.diffusers.tiny import CPU, PHOTO, Tiny, stage_options


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name) / "pipeline"
        return make_demo_checkpoint(folder, family="diffusers", pipeline=name)

    return made


@pytest.fixture(scope="session")
def tiny(tiny_folder: Callable[[str], Path]) -> Callable[[str], Tiny]:
    """Takes a name of scripts/make_demo_checkpoint's pipelines."""

    @cache
    def loaded(name: str) -> Tiny:
        pipe = load_pipeline(tiny_folder(name), stage_options(), "float32", CPU)
        if name == "qwen-image":
            return Tiny(name, pipe, 4, {"true_cfg_scale": 4.0, "negative_prompt": "blurred"})
        if name == "qwen-image-edit":
            return Tiny(name, pipe, 2, {}, (PHOTO,))  # two steps: each image takes seconds
        return Tiny(name, pipe, 4, {"guidance_scale": 4.0})

    return loaded
