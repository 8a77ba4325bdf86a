"""Diffusers pipelines: an index in the place of config.json, and weights in a folder per component."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from omni_server.check.files import read_weights, weight_problems
from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.config.model_folder import architectures_of, config_file, resolve_model_folder
from omni_server.errors import ConfigError

CONFIG = load_stage_config(find_shipped_config("diffusers.demo-cpu"))


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "SomePipeline"}))
    for component in ("unet", "vae"):
        (tmp_path / component).mkdir()
        save_file({"conv.weight": torch.zeros(2, 3)}, tmp_path / component / "model.safetensors")
    return tmp_path


def test_a_pipeline_is_found_by_its_index(pipeline: Path) -> None:
    assert config_file(pipeline).name == "model_index.json"
    assert architectures_of(pipeline) == ("DiffusionPipeline",)
    assert resolve_model_folder(str(pipeline), architectures=["DiffusionPipeline"]) == pipeline
    with pytest.raises(ConfigError, match="names DiffusionPipeline, and not SomeOmniModel"):
        resolve_model_folder(str(pipeline), architectures=["SomeOmniModel"])


def test_weights_are_named_after_their_component(pipeline: Path) -> None:
    stored = read_weights(pipeline, CONFIG)
    assert {name: tensor.path for name, tensor in stored.tensors.items()} == {
        "unet/conv.weight": pipeline / "unet" / "model.safetensors",
        "vae/conv.weight": pipeline / "vae" / "model.safetensors",
    }
    assert (stored.num_files, stored.problems) == (2, [])
    assert list(weight_problems(pipeline, stored, {})) == []


def test_a_damaged_component_is_named(pipeline: Path) -> None:
    path = pipeline / "vae" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    (problem,) = weight_problems(pipeline, read_weights(pipeline, CONFIG), {})
    assert problem.startswith(f"{path}: cannot be read as safetensors")


def test_pickled_weights_are_none(pipeline: Path) -> None:
    for path in pipeline.glob("*/*.safetensors"):
        path.rename(path.with_suffix(".bin"))
    (problem,) = weight_problems(pipeline, read_weights(pipeline, CONFIG), {})
    assert "no weights in the format safetensors, the only one that is loaded" in problem
