"""Image requests beyond OpenAI's fields, the operator's limits, and what the model's card says."""

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from omni_server.api.config import ApiConfig
from omni_server.api.images.files import TEXT_CHUNK
from omni_server.types import ModelInfo
from omni_server.types.images import ImageOutput, ImageSize, Lora
from tests.unit.api.clients import app_of, error_of, http_client
from tests.unit.api.fake_generator import EDITING_MODEL, IMAGE_MODEL, IMAGE_PROMPT, MODEL, FakeGenerator
from tests.unit.api.test_images import PROMPT, ask, files_of, painted, painter


async def test_extensions_reach_the_model() -> None:
    generator = painter()
    fields = {"negative_prompt": "rain", "guidance_scale": 3.5, "true_cfg_scale": 4}
    await painted(generator, size="64x32", seed=7, num_inference_steps=20, **fields)
    assert generator.last_request.image == ImageOutput(
        ImageSize(64, 32), 7, num_steps=20, negative_prompt="rain", guidance_scale=3.5, true_cfg_scale=4.0
    )


@pytest.mark.parametrize("size", [None, "auto", "64x32"])
async def test_width_and_height_are_as_good_as_a_size(size: str | None) -> None:
    generator = painter()
    await painted(generator, width=64, height=32, size=size)
    assert generator.last_request.image == ImageOutput(ImageSize(64, 32))


async def test_a_refused_field_of_another_server_is_told_what_to_use() -> None:
    message = error_of(await ask(painter(), num_outputs_per_prompt=2))["message"]
    assert message == "'num_outputs_per_prompt' is not supported; use 'n' instead."


@pytest.mark.parametrize(
    ("given", "loras"),
    [
        ("paper", (Lora("paper"),)),
        ([{"name": "ink", "scale": 0.5}, {"name": "paper"}], (Lora("ink", 0.5), Lora("paper"))),
        ({"name": "ink", "scale": 2}, (Lora("ink", 2.0),)),
        ('[{"name": "ink", "scale": -1}]', (Lora("ink", -1.0),)),  # as in a form
        ([], ()),
        (None, ()),
    ],
)
async def test_adapters_are_chosen_by_name_and_scale(given: object, loras: tuple[Lora, ...]) -> None:
    generator = painter()
    await painted(generator, lora=given)
    assert generator.last_request.image == ImageOutput(loras=loras)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (1, "lora"),
        ([{}], "lora[0].name"),
        ([{"name": "ink", "scale": 11}], "lora[0].scale"),
        ("[1", "lora"),
        ("[" * 100_000, "lora"),
        ('[{"name": "\\ud800"}]', "lora"),
    ],
)
async def test_what_names_no_adapter_is_refused(given: object, param: str) -> None:
    assert error_of(await ask(painter(), lora=given))["param"] == param


async def test_an_empty_negative_prompt_is_one() -> None:
    """Pipelines guide with it, and without one they do not."""
    generator = painter()
    await painted(generator, negative_prompt="", true_cfg_scale=4)
    assert generator.last_request.image == ImageOutput(negative_prompt="", true_cfg_scale=4.0)


async def test_the_operator_limits_steps_and_pixels() -> None:
    config = ApiConfig(max_image_steps=10, max_output_pixels=1000)
    generator = FakeGenerator(EDITING_MODEL)
    assert (await ask(generator, config, num_inference_steps=10, size="16x32")).status_code == 200
    assert error_of(await ask(generator, config, num_inference_steps=11))["param"] == "num_inference_steps"
    assert error_of(await ask(generator, config, size="32x32"))["param"] == "size"


@pytest.mark.parametrize(
    ("model", "max_pixels", "size"),
    [
        (IMAGE_MODEL, 32 * 32, None),
        (EDITING_MODEL, 1000, ImageSize(16, 16)),
        (replace(IMAGE_MODEL, image_sizes=(ImageSize(32, 32), ImageSize(16, 32))), 1000, ImageSize(16, 32)),
    ],
)
async def test_an_automatic_size_is_within_the_operator_s_limit(
    model: ModelInfo, max_pixels: int, size: ImageSize | None
) -> None:
    generator = FakeGenerator(model)
    response = await ask(generator, ApiConfig(max_output_pixels=max_pixels), size="auto")
    assert response.status_code == 200, response.text
    assert generator.last_request.image == ImageOutput(size)


async def test_a_png_has_the_parameters_that_make_it_again() -> None:
    fields: dict[str, Any] = {"negative_prompt": "rain", "num_inference_steps": 3, "guidance_scale": 2.5}
    fields |= {"lora": [{"name": "ink", "scale": 0.5}]}
    files = files_of(await painted(painter(), n=2, include_parameters=True, **fields))
    for file in files:
        parameters = json.loads(Image.open(io.BytesIO(file)).info[TEXT_CHUNK])
        assert parameters.keys() == {"model", "prompt", "size", "seed", *fields}
        assert parameters["prompt"] == PROMPT
        (again,) = files_of(await painted(painter(), include_parameters=True, **parameters))
        assert again == file
    assert files[0] != files[1]


async def test_a_png_has_no_parameters_unless_asked() -> None:
    (file,) = files_of(await painted(painter(), seed=1))
    assert Image.open(io.BytesIO(file)).info == {}


async def test_usage_counts_squares_of_16_pixels() -> None:
    generator = painter()
    body = await painted(generator, n=3, size="48x32")
    one = 3 * 2
    given = IMAGE_PROMPT.image
    assert body["usage"] == {
        "input_tokens": given,
        "input_tokens_details": {"image_tokens": given, "text_tokens": 0},
        "output_tokens": 3 * one,
        "output_tokens_details": {"image_tokens": 3 * one, "text_tokens": 0},
        "total_tokens": given + 3 * one,
    }


async def test_the_model_s_card_says_what_it_makes() -> None:
    async def card(model: ModelInfo, config: ApiConfig | None = None) -> dict[str, Any]:
        async with http_client(app_of(FakeGenerator(model), config)) as client:
            found: dict[str, Any] = (await client.get("/v1/models/omni")).json()
        return found

    assert (await card(MODEL))["images"] is None
    edits = await card(EDITING_MODEL)
    assert edits["modalities"] == {"input": ["text", "image"], "output": ["image"]}
    assert edits["images"] == {
        "sizes": ["32x32", "48x32"],
        "free_sizes": {"multiple": 16, "max_ratio": 3.0, "max_pixels": 4096},
        "parameters": [
            "guidance_scale",
            "lora",
            "negative_prompt",
            "num_inference_steps",
            "partial_images",
            "true_cfg_scale",
        ],
        "max_input_images": 2,
        "needs_input_image": False,
        "loras": ["paper", "ink"],
    }
    without_options = (await card(IMAGE_MODEL))["images"]
    assert (without_options["free_sizes"], without_options["parameters"]) == (None, [])
    limited = (await card(EDITING_MODEL, ApiConfig(max_output_pixels=1024)))["images"]
    assert (limited["sizes"], limited["free_sizes"]["max_pixels"]) == (["32x32"], 1024)
    below = (await card(EDITING_MODEL, ApiConfig(max_output_pixels=1000)))["images"]
    assert below["sizes"] == ["16x16"]
