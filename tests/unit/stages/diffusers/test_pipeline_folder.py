"""Which folders are opened, and why others are refused before anything of them is loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni_server.errors import ConfigError
from stages.diffusers.pipeline_folder import read_pipeline_folder


@pytest.fixture
def folder(tiny_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder("sd15"), tmp_path / "pipeline"))


def set_index(folder: Path, **changes: Any) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_pipeline_folder(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_names_its_class_and_components(folder: Path) -> None:
    found = read_pipeline_folder(folder)
    assert found.class_name == "StableDiffusionPipeline"
    assert set(found.components) == {"unet", "vae", "text_encoder", "tokenizer", "scheduler"}
    assert found.components["unet"] == ("diffusers", "UNet2DConditionModel")
    assert {path.parent.name for path in found.weight_files()} == {"unet", "vae", "text_encoder"}
    assert found.variant is None


def test_a_pipeline_of_custom_code_is_refused(folder: Path) -> None:
    (folder / "my_pipeline.py").write_text("raise SystemExit('executed')")
    set_index(folder, _class_name=["my_pipeline", "MyPipeline"])
    assert "custom pipelines, whose code is in the folder, are not run" in refusal(folder)


def test_a_component_of_custom_code_is_refused(folder: Path) -> None:
    (folder / "unet" / "my_unet.py").write_text("raise SystemExit('executed')")
    set_index(folder, unet=["my_unet", "MyUNet"])
    assert "unet is the class MyUNet of my_unet; only classes of diffusers and transformers" in refusal(
        folder
    )


@pytest.mark.parametrize("file", ["text_encoder/config.json", "tokenizer/tokenizer_config.json"])
def test_a_component_that_refers_to_remote_code_is_refused(folder: Path, file: str) -> None:
    path = folder / file
    document = json.loads(path.read_text()) | {"auto_map": {"AutoModel": "evil--modeling.Model"}}
    path.write_text(json.dumps(document))
    assert "refers to code in the folder (auto_map)" in refusal(folder)


@pytest.mark.parametrize("suffix", ["bin", "ckpt", "pt"])
def test_pickled_weights_are_refused(folder: Path, suffix: str) -> None:
    (weights,) = (folder / "unet").glob("*.safetensors")
    weights.rename(weights.with_suffix(f".{suffix}"))
    assert "a pickle, which can run any code; only *.safetensors is loaded" in refusal(folder)


def test_pickled_weights_beside_safe_ones_do_not_matter(folder: Path) -> None:
    (folder / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"never read")
    assert read_pipeline_folder(folder).class_name == "StableDiffusionPipeline"


def test_weights_of_half_precision_are_found(folder: Path) -> None:
    for weights in folder.glob("*/*.safetensors"):
        weights.rename(weights.with_suffix(".fp16.safetensors"))
    found = read_pipeline_folder(folder)
    assert found.variant == "fp16"
    assert len(list(found.weight_files())) == 3


def test_missing_weights_are_named(folder: Path) -> None:
    (weights,) = (folder / "vae").glob("*.safetensors")
    weights.unlink()
    assert refusal(folder) == f"{folder / 'vae'} has no weights (*.safetensors): download them"


def test_a_folder_without_any_weights_is_read(folder: Path) -> None:
    assert read_pipeline_folder(folder).has_weights
    for weights in folder.glob("*/*.safetensors"):
        weights.unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "text_encoder" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not read_pipeline_folder(folder).has_weights


def test_a_missing_shard_is_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "text_encoder" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "the first is model-00001-of-00002.safetensors" in refusal(folder)


def test_a_missing_component_is_named(folder: Path) -> None:
    shutil.rmtree(folder / "scheduler")
    assert f"{folder / 'scheduler'} is missing" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"_class_name": None}, "_class_name is null"),
        ({"unet": ["diffusers", None]}, "not a library and a class"),
        ({"unet": "diffusers"}, None),
        ({"../unet": ["diffusers", "UNet2DConditionModel"]}, "is no name of a component"),
    ],
)
def test_an_index_that_is_no_index_is_refused(
    folder: Path, changes: dict[str, Any], problem: str | None
) -> None:
    set_index(folder, **changes)
    if problem is None:  # a plain setting of the pipeline
        assert "unet" not in read_pipeline_folder(folder).components
    else:
        assert problem in refusal(folder)


def test_an_index_that_is_no_json_is_refused(folder: Path) -> None:
    (folder / "model_index.json").write_text("{")
    assert "cannot be read as JSON" in refusal(folder)
