"""Diffusers pipelines in the server process."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.errors import ConfigError, InvalidRequestError
from omni_server.orchestrator.image_requests import ImageRequests
from omni_server.protocol.images import ImageJob, Pixels, decode_job
from omni_server.types import ChatMessage, ImagePart, TextPart
from omni_server.types.images import ImageOutput, ImageSize
from stages.diffusers import FAMILY
from stages.diffusers.family import DiffusersModel
from tests.checkpoints.write import make_demo_checkpoint
from tests.unit.stages.diffusers.tiny import stage_options

EDITING = stage_options(max_model_len=8192, max_num_batched_tokens=8192, max_image_tokens=512)
PHOTO = np.random.default_rng(0).integers(0, 255, (48, 96, 3), dtype=np.uint8)


@pytest.fixture
def model(tiny_folder: Callable[[str], Path]) -> Callable[[str], DiffusersModel]:
    return lambda name: FAMILY.open(tiny_folder(name))


def messages(text: str, *images: Any) -> tuple[ChatMessage, ...]:
    return (ChatMessage("user", (TextPart(text), *(ImagePart(image) for image in images))),)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen-image", {"negative_prompt", "num_steps", "guidance_scale", "true_cfg_scale"}),
        ("flux", {"negative_prompt", "num_steps", "guidance_scale", "true_cfg_scale"}),
        ("sd15", {"negative_prompt", "num_steps", "guidance_scale"}),
        ("sd3", {"negative_prompt", "num_steps", "guidance_scale"}),
    ],
)
def test_parameters_are_those_of_the_pipeline(
    model: Callable[[str], DiffusersModel], name: str, parameters: set[str]
) -> None:
    features = model(name).image_features(stage_options())
    assert features.parameters == parameters | {"num_partial_images"}
    assert (features.max_input_images, features.needs_input_image) == (0, False)


def test_a_pipeline_that_edits_needs_an_image(model: Callable[[str], DiffusersModel]) -> None:
    features = model("qwen-image-edit").image_features(EDITING)
    assert (features.max_input_images, features.needs_input_image) == (1, True)


@pytest.mark.parametrize(("name", "side"), [("qwen-image", 1024), ("sd15", 512), ("sd3", 1024)])
def test_the_default_size_is_that_of_training(
    model: Callable[[str], DiffusersModel], name: str, side: int
) -> None:
    assert model(name).image_sizes == (ImageSize(side, side),)


def test_sizes_follow_the_limits_of_the_stage(model: Callable[[str], DiffusersModel]) -> None:
    images = ImageRequests(model("qwen-image"), stage_options(max_model_len=600, max_image_tokens=512))
    assert images.sizes == (ImageSize(352, 352),)
    free = images.features.free_sizes
    assert free is not None
    assert free.allows(ImageSize(512, 256))
    for refused in (ImageSize(520, 128), ImageSize(528, 256), ImageSize(256, 64), ImageSize(0, 16)):
        assert not free.allows(refused)


def test_a_request_becomes_a_job_that_counts_its_tokens(model: Callable[[str], DiffusersModel]) -> None:
    images = ImageRequests(model("qwen-image"), stage_options())
    asked = ImageOutput(ImageSize(256, 128), 7, "ugly", 9, 1.5, 4.0, 2)
    prompt, size = images.render(messages("a cat"), asked)
    assert size == ImageSize(256, 128)
    assert len(prompt.token_ids) == 16 * 8
    assert decode_job(prompt.payload) == ImageJob("a cat", 256, 128, 7, "ugly", 9, 1.5, 4.0, (), 2)


def test_an_edited_image_keeps_its_shape_and_counts_the_image_to_edit(
    model: Callable[[str], DiffusersModel],
) -> None:
    images = ImageRequests(model("qwen-image-edit"), EDITING)
    prompt, size = images.render(messages("make it blue", PHOTO), ImageOutput(seed=1))
    assert size == ImageSize(496, 240)
    assert len(prompt.token_ids) == 31 * 15 + 4096
    assert decode_job(prompt.payload).images == (Pixels.of(PHOTO),)


def test_only_some_pipelines_take_several_images(
    model: Callable[[str], DiffusersModel], tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """To others, a list of images is a batch of requests."""
    two = messages("make it blue", PHOTO, PHOTO)
    with pytest.raises(InvalidRequestError, match="this model takes 1 at most") as caught:
        ImageRequests(model("qwen-image-edit"), EDITING).render(two, ImageOutput())
    assert caught.value.param == "image"
    folder = shutil.copytree(tiny_folder("qwen-image-edit"), tmp_path / "plus")
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("QwenImageEditPipeline", "QwenImageEditPlusPipeline"))
    images = ImageRequests(FAMILY.open(folder), EDITING)
    assert images.features.max_input_images == 16
    with pytest.raises(InvalidRequestError, match="maximum context length is 8192") as caught:
        images.render(two, ImageOutput())
    assert caught.value.param == "image"


def test_the_shipped_config_serves_an_edit_of_automatic_size(model: Callable[[str], DiffusersModel]) -> None:
    config = load_stage_config(find_shipped_config("diffusers"))
    images = ImageRequests(model("qwen-image-edit"), config.stages["image"])
    prompt, size = images.render(messages("make it blue", PHOTO), ImageOutput())
    assert size == ImageSize(1440, 720)
    assert len(prompt.token_ids) == 90 * 45 + 4096


def test_a_stage_without_room_for_an_edit_of_automatic_size_is_refused(
    model: Callable[[str], DiffusersModel],
) -> None:
    stage = stage_options(max_model_len=6144, max_num_batched_tokens=6144)
    with pytest.raises(ConfigError, match="needs 8192 image tokens, 4096 of them"):
        ImageRequests(model("qwen-image-edit"), stage)
    assert ImageRequests(model("qwen-image"), stage).sizes == (ImageSize(1024, 1024),)


@pytest.mark.parametrize(
    ("name", "content", "image", "param"),
    [
        ("sd3", (), ImageOutput(true_cfg_scale=4.0), "true_cfg_scale"),
        ("sd3", (PHOTO,), ImageOutput(), "image"),
        ("sd3", (), ImageOutput(ImageSize(1024, 1024)), "size"),
        ("sd3", (), ImageOutput(ImageSize(100, 100)), "size"),
        ("qwen-image-edit", (), ImageOutput(), "image"),
        ("qwen-image-edit", (PHOTO[:15],), ImageOutput(), "image"),
    ],
)
def test_what_the_model_cannot_do_is_refused_with_the_field(
    model: Callable[[str], DiffusersModel],
    name: str,
    content: tuple[Any, ...],
    image: ImageOutput,
    param: str,
) -> None:
    stage = EDITING if name == "qwen-image-edit" else stage_options()
    with pytest.raises(InvalidRequestError) as caught:
        ImageRequests(model(name), stage).render(messages("x", *content), image)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("class_name", "problem"),
    [
        ("os", "os is no pipeline of diffusers 0.42.1"),
        ("WanPipeline", "WanPipeline makes videos; only pipelines that make an image"),
        ("StableAudioPipeline", "StableAudioPipeline has no parameter height"),
        ("StableDiffusionInpaintPipeline", "needs a mask with each prompt"),
        ("FluxControlPipeline", "FluxControlPipeline needs a control image with each prompt"),
        ("StableDiffusionControlNetPipeline", "needs a control image"),
        ("QwenImageControlNetPipeline", "needs a control image"),
        ("StableDiffusionXLAdapterPipeline", "needs a control image"),
        ("KandinskyPipeline", "needs image_embeds with each prompt"),
    ],
)
def test_what_makes_no_images_from_prompts_is_refused(
    tiny_folder: Callable[[str], Path], tmp_path: Path, class_name: str, problem: str
) -> None:
    folder = Path(shutil.copytree(tiny_folder("sd15"), tmp_path / "pipeline"))
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_class_name": class_name}))
    with pytest.raises(ConfigError, match=problem):
        FAMILY.open(folder)


def test_footprints_are_the_weights_of_all_components(tiny_folder: Callable[[str], Path]) -> None:
    config = load_stage_config(find_shipped_config("diffusers.demo-cpu"))
    footprint = FAMILY.footprints(tiny_folder("sd15"), config)["image"]
    assert footprint.tensors["unet/conv_in.weight"] == (4, 4, 3, 3)
    assert {name.partition("/")[0] for name in footprint.tensors} == {"unet", "vae", "text_encoder"}


def test_the_dtype_is_that_of_the_denoiser(tmp_path: Path) -> None:
    folder = make_demo_checkpoint(
        tmp_path / "pipeline", family="diffusers", pipeline="flux", dtype="bfloat16"
    )
    assert FAMILY.open(folder).dtype_name() == "bfloat16"


def test_a_stage_too_small_for_any_image_is_refused(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_folder("sd15"), tmp_path / "pipeline"))
    path = folder / "vae" / "config.json"
    coarse = {"block_out_channels": [4] * 6}  # 32 pixels to a latent
    path.write_text(json.dumps(json.loads(path.read_text()) | coarse))
    model = FAMILY.open(folder)
    features = model.image_features(stage_options(max_model_len=4))
    assert features.free_sizes is not None
    assert features.free_sizes.multiple == 32
    with pytest.raises(ConfigError, match="an image has at least 4 image tokens, and max_image_tokens"):
        model.image_features(stage_options(max_model_len=3))


def test_an_image_may_not_be_larger_than_a_request() -> None:
    with pytest.raises(ValueError, match="max_image_tokens is 2000, more than max_model_len"):
        stage_options(max_image_tokens=2000)


def test_diffusers_is_not_imported_before_a_pipeline_is_opened() -> None:
    code = (
        "import sys\nfrom omni_server.config.load import find_shipped_config, load_stage_config\n"
        "from omni_server.family import load_family\n"
        "load_stage_config(find_shipped_config('diffusers.demo-cpu'))\n"
        "load_family('stages.diffusers:FAMILY')\n"
        "sys.exit('diffusers' in sys.modules or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
