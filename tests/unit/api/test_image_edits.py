"""`POST /v1/images/edits`."""

import asyncio
import io
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx2
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from omni_server.api.app import create_app
from omni_server.api.config import ApiConfig
from omni_server.api.images.router import MAX_IMAGE_BYTES, MAX_INPUT_IMAGES
from omni_server.api.media_loader import LARGEST_IN_MEMORY
from omni_server.api.state import ServerState
from omni_server.errors import InvalidRequestError
from omni_server.media.limits import MediaLimits
from omni_server.types import ImagePart, TextPart
from omni_server.types.images import ImageOutput, ImageSize
from tests.unit.api.asgi_call import AsgiCall
from tests.unit.api.clients import app_of, error_of, http_client
from tests.unit.api.fake_generator import (
    EDITING_MODEL,
    IMAGE_MODEL,
    FakeGenerator,
    Wait,
    image_of,
    image_script,
)
from tests.unit.api.sse_validator import read_image_stream
from tests.unit.api.test_images import files_of, pixels_of

EDITS_URL = "/v1/images/edits"
PROMPT = "Make it night, 🌅"
File = tuple[str, tuple[str, bytes]]


def picture(shade: int, width: int = 20, height: int = 10) -> npt.NDArray[np.uint8]:
    pixels = np.full((height, width, 3), shade, np.uint8)
    pixels[0] = 255 - shade
    return pixels


def file_of(pixels: npt.NDArray[np.uint8], name: str = "png") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, name, lossless=True)
    return file.getvalue()


DARK, LIGHT = file_of(picture(20)), file_of(picture(200), "webp")


def editor() -> FakeGenerator:
    return FakeGenerator(EDITING_MODEL)


async def ask(
    generator: FakeGenerator,
    files: Sequence[File] = (("image", ("a.png", DARK)),),
    config: ApiConfig | None = None,
    **fields: Any,
) -> httpx2.Response:
    form = {name: value for name, value in ({"prompt": PROMPT} | fields).items() if value is not None}
    async with http_client(app_of(generator, config)) as client:
        return await client.post(EDITS_URL, data=form, files=list(files) or [("unused", (None, b""))])


def given_images(generator: FakeGenerator) -> list[npt.NDArray[np.uint8]]:
    (message,) = generator.last_request.messages
    *images, text = message.content
    assert text == TextPart(PROMPT)
    assert all(isinstance(image, ImagePart) for image in images)
    return [image.pixels for image in images if isinstance(image, ImagePart)]


async def test_an_image_and_a_prompt_become_an_image() -> None:
    generator = editor()
    response = await ask(generator)
    assert response.status_code == 200, response.text
    body = response.json()
    (pixels,) = given_images(generator)
    np.testing.assert_array_equal(pixels, picture(20))
    assert generator.last_request.image == ImageOutput()
    (file,) = files_of(body)
    np.testing.assert_array_equal(pixels_of(file), image_of(ImageOutput()))
    assert body["usage"]["input_tokens_details"]["image_tokens"] > 0


async def test_fields_of_the_form_are_those_of_generations() -> None:
    generator = editor()
    fields = {"n": "2", "width": "48", "height": "32", "seed": "7", "num_inference_steps": "3"}
    response = await ask(
        generator,
        model="omni",
        output_format="webp",
        output_compression="50",
        negative_prompt="rain",
        guidance_scale="2.5",
        num_outputs_per_prompt="1",
        **fields,
    )
    assert response.status_code == 200, response.text
    output = ImageOutput(ImageSize(48, 32), 7, "rain", 3, 2.5)
    assert [request.image for request in generator.requests] == [output, replace(output, seed=8)]
    files = files_of(response.json())
    assert [Image.open(io.BytesIO(file)).format for file in files] == ["WEBP"] * 2


@pytest.mark.parametrize("names", [("image", "image"), ("image[]", "image[]")])
async def test_several_images_keep_their_order(names: Sequence[str]) -> None:
    generator = editor()
    files = [(name, ("a", data)) for name, data in zip(names, (LIGHT, DARK), strict=True)]
    assert (await ask(generator, files)).status_code == 200
    light, dark = given_images(generator)
    np.testing.assert_array_equal(light, picture(200))
    np.testing.assert_array_equal(dark, picture(20))


async def test_events_are_named_after_the_endpoint() -> None:
    response = await ask(editor(), stream="true", partial_images="1")
    assert len(read_image_stream(response.text, "image_edit").partial) == 1


async def test_empty_fields_and_defaults_change_nothing() -> None:
    generator = editor()
    names = ("model", "n", "size", "seed", "stream", "quality", "mask", "input_fidelity", "guidance_scale")
    response = await ask(generator, **dict.fromkeys(names, ""))
    assert response.status_code == 200, response.text
    response = await ask(
        generator, quality="auto", background="opaque", input_fidelity="low", user="u", x="y"
    )
    assert response.status_code == 200, response.text
    assert [request.image for request in generator.requests] == [ImageOutput()] * 2


async def test_an_automatic_size_within_the_limit_has_the_shape_of_the_first_image() -> None:
    generator = editor()
    tall = [("image", ("a", file_of(picture(20, 10, 30))))]
    assert (await ask(generator, tall, ApiConfig(max_output_pixels=1000))).status_code == 200
    assert generator.last_request.image == ImageOutput(ImageSize(16, 48))


# -- what is refused


@pytest.mark.parametrize(
    ("fields", "files", "param", "code"),
    [
        ({"prompt": None}, None, "prompt", "missing_required_parameter"),
        ({"prompt": "x" * 130_000}, None, None, "invalid_form"),
        ({}, [], "image", "missing_required_parameter"),
        ({"image": "https://example.org/a.png"}, [], "image", "invalid_type"),
        ({"image": "https://example.org/a.png"}, None, "image", "invalid_type"),
        ({"svg[model]": "x"}, None, "svg[model]", "unsupported_value"),
        ({"strength": "0.5"}, None, "strength", "unsupported_value"),
        ({"true_cfg_scale": "4"}, None, "true_cfg_scale", "invalid_value"),
        ({}, [("image", ("a", DARK)), ("mask", ("m", DARK))], "mask", "unsupported_value"),
        ({"mask": "data:"}, None, "mask", "unsupported_value"),
        ({}, [("image", ("a", DARK)), ("markup", ("m", DARK))], "markup", "unsupported_value"),
        ({}, [("image", ("a", b""))], "image", "invalid_image"),
        ({}, [("image", ("a", DARK[:40]))], "image", "invalid_image"),
        ({}, [("image", ("a", b"GIF89a"))], "image", "invalid_image"),
        (
            {},
            [("image[]", ("a", DARK))] * (MAX_INPUT_IMAGES + 1),
            "image",
            "array_above_max_length",
        ),
        ({}, [("image[]", ("a", DARK))] * 30, None, "invalid_form"),
        ({"n": "two"}, None, "n", "invalid_value"),
        ({"guidance_scale": "nan"}, None, "guidance_scale", "decimal_above_max_value"),
        ({"stream": "perhaps"}, None, "stream", "invalid_value"),
        ({"input_fidelity": "high"}, None, "input_fidelity", "invalid_value"),
    ],
)
async def test_a_form_that_cannot_be_served_is_refused(
    fields: dict[str, Any], files: list[File] | None, param: str | None, code: str
) -> None:
    generator = editor()
    given = [("image", ("a.png", DARK))] if files is None else files
    error = error_of(await ask(generator, given, **fields))
    assert (error["param"], error["code"]) == (param, code)
    assert generator.requests == []


def png_of_zeros(width: int, height: int) -> bytes:
    """A small file whose header declares many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\x00\x00\x00"
    rows = zlib.compress(bytes(100_000_000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


async def test_a_small_file_of_very_many_pixels_is_refused() -> None:
    bomb = png_of_zeros(30_000, 30_000)
    assert len(bomb) < 200_000
    error = error_of(await ask(editor(), [("image", ("a.png", bomb))]))
    assert (error["param"], error["code"]) == ("image", "invalid_image")


async def test_images_together_are_bounded() -> None:
    config = ApiConfig(media_limits=MediaLimits(max_image_pixels=300))
    two = [("image", ("a", DARK)), ("image", ("b", LIGHT))]
    assert (await ask(editor(), two[:1], config)).status_code == 200
    error = error_of(await ask(editor(), two, config))
    assert (error["param"], error["code"]) == ("image", "invalid_image")
    assert "300 pixels" in error["message"]


async def test_images_count_once_for_each_image_to_make() -> None:
    """Each request to the model has its own copy."""
    config = ApiConfig(media_limits=MediaLimits(max_image_pixels=400))
    assert (await ask(editor(), config=config, n="2")).status_code == 200
    error = error_of(await ask(editor(), config=config, n="3"))
    assert (error["param"], error["code"]) == ("image", "invalid_image")
    assert "each of the 3 images to make" in error["message"]


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_images_of_all_requests_are_bounded(stream: str) -> None:
    """Four fill the room; another waits for its time, and gets it when one has ended."""
    generator = editor()
    leave = asyncio.Event()
    generator.script = [Wait(leave), *image_script(ImageOutput())]
    limits = MediaLimits(max_image_pixels=picture(20).size // 3)
    config = ApiConfig(media_limits=limits, max_upload_seconds=0.001, media_queue_timeout_s=0.2)
    app = app_of(generator, config)
    async with http_client(app) as client:

        async def edit() -> httpx2.Response:
            return await client.post(
                EDITS_URL, data={"prompt": PROMPT, "stream": stream}, files={"image": ("a", DARK)}
            )

        running = [asyncio.create_task(edit()) for _ in range(LARGEST_IN_MEMORY)]
        while len(generator.requests) < LARGEST_IN_MEMORY:  # noqa: ASYNC110 - the event is of the first only
            await asyncio.sleep(0)
        assert error_of(await edit(), 503)["code"] == "server_overloaded"
        leave.set()
        answers = [await answer for answer in running]
        assert [answer.status_code for answer in [*answers, await edit()]] == [200] * (LARGEST_IN_MEMORY + 1)


async def test_a_file_of_more_than_50_mb_is_too_large() -> None:
    generator = editor()
    error = error_of(await ask(generator, [("image", ("a", bytes(MAX_IMAGE_BYTES + 1)))]), 413)
    assert (error["param"], error["code"]) == ("image", "file_too_large")
    assert generator.requests == []


async def test_a_model_that_edits_nothing_refuses_before_it_reads_the_form() -> None:
    generator = FakeGenerator(IMAGE_MODEL)
    call = AsgiCall(app_of(generator), path=EDITS_URL, raw_body=[b"--b\r\n"], body_ends=False)
    call.set_content_type("multipart/form-data; boundary=b")
    async with call:
        body = await call.body_until(b"}}")
    assert b"does not edit images" in body
    assert call.num_chunks_read == 0


async def test_more_images_than_the_model_takes_are_refused_before_they_are_decoded() -> None:
    files = [("image[]", ("a", DARK[:40]))] * 3
    error = error_of(await ask(editor(), files))
    assert (error["param"], error["code"]) == ("image", "array_above_max_length")
    assert error["message"] == "Invalid 'image': too many files. Expected 2 at most, but got 3."


async def test_too_many_tokens_of_images_are_blamed_on_the_images() -> None:
    generator = editor()
    generator.submit_error = InvalidRequestError("too long", param="image", code="context_length_exceeded")
    assert error_of(await ask(generator))["param"] == "image"


async def test_an_accepted_edit_that_waits_for_room_is_done_by_a_server_that_drains() -> None:
    generator = editor()
    leave = asyncio.Event()
    generator.script = [Wait(leave), *image_script(ImageOutput())]
    state = ServerState(generator)
    limits = MediaLimits(max_image_pixels=picture(20).size // 3)
    config = ApiConfig(media_limits=limits, max_upload_seconds=0.001)
    async with http_client(create_app(state, config)) as client:
        running = [
            asyncio.create_task(client.post(EDITS_URL, data={"prompt": PROMPT}, files={"image": ("a", DARK)}))
            for _ in range(LARGEST_IN_MEMORY + 1)
        ]
        while len(generator.requests) < LARGEST_IN_MEMORY:  # noqa: ASYNC110 - the event is of the first only
            await asyncio.sleep(0)
        state.draining.set()
        leave.set()
        assert [(await answer).status_code for answer in running] == [200] * (LARGEST_IN_MEMORY + 1)
