"""`POST /v1/images/generations`."""

import asyncio
import base64
import io
from typing import Any

import httpx2
import numpy as np
import numpy.typing as npt
import pytest
from openai import BadRequestError
from PIL import Image

from omni_server.api.config import ApiConfig
from omni_server.errors import (
    CorruptDataError,
    DeadlineExceededError,
    InvalidRequestError,
    OmniError,
    OverloadedError,
    StageDeadError,
)
from omni_server.generation import Deliver
from omni_server.types import ChatMessage, TextPart
from omni_server.types.images import ImageOutput, ImageProgress, ImageSize
from tests.unit.api.asgi_call import AsgiCall
from tests.unit.api.clients import app_of, chat, error_of, http_client, openai_client, post
from tests.unit.api.fake_generator import (
    IMAGE_MODEL,
    NUM_STEPS,
    FakeGenerator,
    Hang,
    image_of,
)
from tests.unit.api.test_metrics import scraped, value
from tests.unit.api.test_request_log import only_line

IMAGES_URL = "/v1/images/generations"
PROMPT = "A lighthouse at dusk, 🌅"


def painter() -> FakeGenerator:
    return FakeGenerator(IMAGE_MODEL)


async def ask(generator: FakeGenerator, config: ApiConfig | None = None, **fields: Any) -> httpx2.Response:
    async with http_client(app_of(generator, config)) as client:
        return await client.post(IMAGES_URL, json={"model": "omni", "prompt": PROMPT} | fields)


async def painted(generator: FakeGenerator, **fields: Any) -> dict[str, Any]:
    response = await ask(generator, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    assert body.keys() == {"created", "data", "background", "output_format", "size", "usage"}
    return body


def files_of(body: dict[str, Any]) -> list[bytes]:
    return [base64.b64decode(image["b64_json"], validate=True) for image in body["data"]]


def pixels_of(file: bytes) -> npt.NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(file)))


# -- the images


async def test_the_prompt_becomes_a_png() -> None:
    generator = painter()
    body = await painted(generator)
    request = generator.last_request
    assert request.messages == (ChatMessage("user", (TextPart(PROMPT),)),)
    assert request.speech is None
    (file,) = files_of(body)
    assert request.image == ImageOutput()
    assert file.startswith(b"\x89PNG")
    np.testing.assert_array_equal(pixels_of(file), image_of(request.image))
    assert (body["output_format"], body["size"], body["background"]) == ("png", "32x32", "opaque")


@pytest.mark.parametrize("name", ["jpeg", "webp"])
async def test_other_formats_are_files_of_that_kind_and_smaller_where_asked(name: str) -> None:
    (best,) = files_of(await painted(painter(), seed=1, output_format=name))
    (small,) = files_of(await painted(painter(), seed=1, output_format=name, output_compression=10))
    assert [Image.open(io.BytesIO(file)).format for file in (best, small)] == [name.upper()] * 2
    assert len(small) < len(best)
    # Both formats halve the resolution of colours, of which noise has too many.
    wanted = Image.fromarray(image_of(ImageOutput(ImageSize(32, 32), 1))).convert("L")
    brightness = np.asarray(Image.open(io.BytesIO(best)).convert("L"), np.int64)
    assert np.abs(brightness - np.asarray(wanted)).mean() < 10


@pytest.mark.parametrize("seed", [0, 7, -2, 2**63 - 1, -(2**63)])
async def test_several_images_are_those_of_consecutive_seeds(seed: int) -> None:
    generator = painter()
    together = files_of(await painted(generator, n=3, seed=seed))
    assert len({request.request_id for request in generator.requests}) == 3
    assert len({request.began_at for request in generator.requests}) == 1
    seeds = [request.image.seed for request in generator.requests if request.image is not None]
    assert seeds == [(seed + index) % 2**63 for index in range(3)]
    alone = [files_of(await painted(painter(), seed=one))[0] for one in seeds]
    assert together == alone
    assert len(set(together)) == 3


@pytest.mark.parametrize("fields", [{}, {"seed": None}, {"seed": -1}])
async def test_without_a_seed_each_image_has_one_of_its_own(fields: dict[str, Any]) -> None:
    generator = painter()
    await painted(generator, n=2, **fields)
    assert [request.image for request in generator.requests] == [ImageOutput()] * 2


@pytest.mark.parametrize(
    "fields",
    [
        {"n": None, "size": None, "response_format": None, "output_format": None},
        {"model": None},
        {"quality": "auto", "style": "vivid", "background": "opaque", "moderation": "low"},
        {"quality": "standard", "background": "auto", "output_compression": 100},
        *[{"quality": quality} for quality in ("low", "medium", "high", "hd")],
        {"extra_body": {}, "num_outputs_per_prompt": 1, "steps": None},
        {"user": "u", "safety_identifier": "s", "stream": False, "partial_images": 0},
        {"true_cfg_scale": 1, "guidance_scale": None, "unheard_of": 1, "mask": None, "svg": None},
        {"include_parameters": False},
    ],
)
async def test_values_that_change_nothing_are_accepted(fields: dict[str, Any]) -> None:
    plain = files_of(await painted(painter(), seed=1))
    assert files_of(await painted(painter(), **fields, seed=1)) == plain


# -- what is refused


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": None}, "prompt", "invalid_type"),
        ({"prompt": " \n"}, "prompt", "empty_string"),
        ({"prompt": "x" * 32_001}, "prompt", "string_above_max_length"),
        ({"n": 0}, "n", "integer_below_min_value"),
        ({"n": 11}, "n", "integer_above_max_value"),
        ({"size": "large"}, "size", "invalid_value"),
        ({"size": "-16x16"}, "size", "invalid_value"),
        ({"size": "0x16"}, "size", "invalid_value"),
        ({"size": "4096x4096"}, "size", "invalid_value"),
        ({"size": "9" * 5_000 + "x1"}, "size", "invalid_value"),
        ({"width": 64}, "height", "missing_required_parameter"),
        ({"height": 64, "size": "64x64"}, "width", "missing_required_parameter"),
        ({"width": 64, "height": 32, "size": "32x64"}, "size", "invalid_value"),
        ({"width": 4096, "height": 4096}, "size", "invalid_value"),
        ({"width": 0, "height": 64}, "width", "integer_below_min_value"),
        ({"width": 64, "height": "64"}, "height", "invalid_type"),
        ({"response_format": "url"}, "response_format", "invalid_value"),
        ({"output_compression": 101}, "output_compression", "integer_above_max_value"),
        ({"output_compression": 50}, "output_compression", "invalid_value"),
        ({"quality": "best"}, "quality", "invalid_value"),
        ({"background": "transparent"}, "background", "invalid_value"),
        ({"output_format": "svg"}, "output_format", "invalid_value"),
        ({"stream": True, "n": 2}, "n", "unsupported_value"),
        ({"partial_images": 2}, "partial_images", "invalid_value"),
        ({"stream": True, "partial_images": 4}, "partial_images", "integer_above_max_value"),
        ({"image": "data:"}, "image", "unsupported_value"),
        ({"mask": "data:"}, "mask", "unsupported_value"),
        ({"frame_count": 9}, "frame_count", "unsupported_value"),
        ({"svg": {}}, "svg", "unsupported_value"),
        ({"extra_body": {"seed": 1}}, "extra_body", "unsupported_value"),
        ({"num_outputs_per_prompt": 2}, "num_outputs_per_prompt", "unsupported_value"),
        ({"image_config": {"aspect_ratio": "1:1"}}, "image_config", "unsupported_value"),
        ({"aspect_ratio": "16:9"}, "aspect_ratio", "unsupported_value"),
        ({"steps": 4}, "steps", "unsupported_value"),
        ({"cfg_scale": 7}, "cfg_scale", "unsupported_value"),
        ({"strength": 0.5}, "strength", "unsupported_value"),
        ({"true_cfg_scale": 4.0}, "true_cfg_scale", "invalid_value"),
        ({"negative_prompt": "x" * 32_001}, "negative_prompt", "string_above_max_length"),
        ({"num_inference_steps": 201}, "num_inference_steps", "integer_above_max_value"),
        ({"guidance_scale": -0.5}, "guidance_scale", "decimal_below_min_value"),
        ({"true_cfg_scale": 20.5}, "true_cfg_scale", "decimal_above_max_value"),
        ({"include_parameters": True, "output_format": "jpeg"}, "include_parameters", "invalid_value"),
    ],
)
async def test_a_value_that_cannot_be_served_is_refused(
    fields: dict[str, Any], param: str, code: str
) -> None:
    generator = painter()
    error = error_of(await ask(generator, **fields))
    assert (error["param"], error["code"]) == (param, code)
    assert generator.requests == []


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
async def test_guidance_that_is_no_number_is_refused(number: str) -> None:
    generator = painter()
    body = f'{{"prompt": "x", "guidance_scale": {number}}}'
    async with http_client(app_of(generator)) as client:
        response = await client.post(IMAGES_URL, content=body, headers={"content-type": "application/json"})
    assert error_of(response)["code"] in ("invalid_json", "decimal_above_max_value")
    assert generator.requests == []


async def test_a_refusal_names_the_values_that_are_served() -> None:
    message = error_of(await ask(painter(), response_format="url"))["message"]
    assert message == "Invalid value: 'url'. Supported values are: 'b64_json'."


async def test_a_size_that_the_model_does_not_have_is_refused_by_the_model() -> None:
    generator = painter()
    generator.submit_error = InvalidRequestError("size 64x64 is not offered; sizes are 32x32", param="size")
    error = error_of(await ask(generator, size="64x64"))
    assert (error["param"], error["code"]) == ("size", "invalid_value")
    assert generator.last_request.image == ImageOutput(ImageSize(64, 64))


@pytest.mark.parametrize(
    ("parameter", "name"), [("num_steps", "num_inference_steps"), ("guidance_scale", "guidance_scale")]
)
async def test_a_parameter_that_the_model_does_not_have_is_called_as_in_the_request(
    parameter: str, name: str
) -> None:
    generator = painter()
    generator.submit_error = InvalidRequestError("no", param=parameter, code="unsupported_parameter")
    error = error_of(await ask(generator, **{name: 3}))
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert error["message"] == f"The model does not have the parameter '{name}'."


async def test_another_model_is_not_found() -> None:
    assert error_of(await ask(painter(), model="gpt-image-1"), 404)["code"] == "model_not_found"


async def test_a_model_without_images_refuses_them() -> None:
    error = error_of(await ask(FakeGenerator()))
    assert (error["param"], error["code"]) == ("model", "unsupported_value")
    assert error["message"] == "The model 'org/omni-tiny' does not generate images."


async def test_a_model_that_only_generates_images_refuses_all_else() -> None:
    generator = painter()
    app = app_of(generator)
    assert "answers with an image only" in error_of(await post(app, chat(modalities=["text"])))["message"]
    async with http_client(app) as client:
        speech = await client.post("/v1/audio/speech", json={"model": "omni", "input": "Hello."})
        card = (await client.get("/v1/models/omni")).json()
        assert (await client.get("/v1/audio/voices")).json() == {"voices": []}
    assert error_of(speech)["message"] == "This model answers with images only."
    assert card["modalities"] == {"input": ["text"], "output": ["image"]}
    assert generator.requests == []


async def test_a_prompt_that_the_model_refuses_is_called_prompt() -> None:
    generator = painter()
    generator.submit_error = InvalidRequestError("too long", param="messages", code="context_length_exceeded")
    async with openai_client(app_of(generator)) as client:
        with pytest.raises(BadRequestError) as refusal:
            await client.images.generate(prompt=PROMPT)
    assert (refusal.value.param, refusal.value.code) == ("prompt", "context_length_exceeded")


# -- how it ends


@pytest.mark.parametrize(
    "error",
    [
        CorruptDataError("painter", "samples", "pixels that are not in [0, 1]"),
        StageDeadError("painter", "it was killed"),
        DeadlineExceededError("the request's deadline has passed"),
        OverloadedError("full"),
    ],
)
async def test_if_an_image_fails_the_request_does(error: OmniError) -> None:
    generator = painter()
    generator.script = [error]
    response = await ask(generator, n=3)
    assert error_of(response, error.status)["code"] == error.code
    assert [generation.num_closed for generation in generator.generations] == [1, 1, 1]


async def test_if_a_submission_fails_those_before_it_are_closed() -> None:
    class FullAfterTwo(FakeGenerator):
        async def submit(self, request: Any, deliver: Deliver) -> Any:
            if len(self.requests) == 2:
                raise OverloadedError("full")
            return await super().submit(request, deliver)

    generator = FullAfterTwo(IMAGE_MODEL)
    assert error_of(await ask(generator, n=3), 503)["code"] == "server_overloaded"
    assert [generation.num_closed for generation in generator.generations] == [1, 1]


async def test_a_client_that_leaves_ends_all_its_images() -> None:
    generator = painter()
    generator.script = [Hang()]
    body = {"prompt": PROMPT, "n": 2}
    async with AsgiCall(app_of(generator), body, path=IMAGES_URL) as call:
        while len(generator.generations) < 2:  # noqa: ASYNC110 - it tells of the first only
            await asyncio.sleep(0)
        call.leave()
        for generation in generator.generations:
            await asyncio.wait_for(generation.closed.wait(), 10)


async def test_each_image_takes_a_place() -> None:
    error = error_of(await ask(painter(), ApiConfig(max_queue=2), n=3))
    assert (error["param"], error["code"]) == ("n", "integer_above_max_value")
    assert (await ask(painter(), ApiConfig(max_queue=2), n=2)).status_code == 200


async def test_a_server_that_is_not_ready_refuses() -> None:
    generator = painter()
    generator.ready = False
    assert error_of(await ask(generator), 503)["code"] == "model_not_ready"


async def test_images_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    app = app_of(painter())
    async with http_client(app) as client:
        await client.post(IMAGES_URL, json={"prompt": PROMPT, "n": 2})
    summary, fields = only_line(caplog)
    assert summary == f"POST {IMAGES_URL} 200"
    assert (fields["answers"], fields["outcome"], fields["reason"]) == (2, "ok", "stop")
    assert fields["steps"] == 2 * NUM_STEPS
    values = await scraped(app)
    assert value(values, "omni_e2e_request_latency_seconds_count", kind="image") == 2
    assert value(values, "omni_requests_total", outcome="ok", reason="stop") == 2
    assert value(values, "omni_images_total") == 2
    assert value(values, "omni_image_steps_total") == 2 * NUM_STEPS
    assert value(values, "http_requests_total", handler=IMAGES_URL, method="POST", status="200") == 1


async def test_steps_of_an_image_that_fails_are_counted() -> None:
    generator = painter()
    generator.script = [ImageProgress(1, 9), ImageProgress(2, 9), StageDeadError("painter", "it was killed")]
    app = app_of(generator)
    async with http_client(app) as client:
        await client.post(IMAGES_URL, json={"prompt": PROMPT})
    values = await scraped(app)
    assert value(values, "omni_images_total") == 0
    assert value(values, "omni_image_steps_total") == 2
