"""Images as server-sent events: previews, the final image, and how streams end."""

import base64
import io
from typing import Any

import numpy as np
import numpy.typing as npt
import openai
import pytest
from PIL import Image

from omni_server.api.config import ApiConfig
from omni_server.errors import CorruptDataError, OverloadedError, StageDeadError
from omni_server.types.images import ImageDone, ImageOutput, ImageProgress, ImageSize
from tests.unit.api.asgi_call import AsgiCall
from tests.unit.api.clients import app_of, error_of, http_client, openai_client
from tests.unit.api.fake_generator import (
    EDITING_MODEL,
    NUM_STEPS,
    FakeGenerator,
    Hang,
    finished,
    image_of,
    preview_of,
)
from tests.unit.api.sse_validator import StreamedImage, parse_events, read_image_stream
from tests.unit.api.test_images import IMAGES_URL, PROMPT, pixels_of

STEP = b": keep-alive\n\n"


def painter(*script: Any) -> FakeGenerator:
    return FakeGenerator(EDITING_MODEL, script or None)


async def stream(generator: FakeGenerator, config: ApiConfig | None = None, **fields: Any) -> str:
    async with http_client(app_of(generator, config)) as client:
        response = await client.post(IMAGES_URL, json={"prompt": PROMPT, "stream": True} | fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].partition(";")[0] == "text/event-stream"
    assert [generation.num_closed for generation in generator.generations] == [1]
    return response.text


async def streamed(generator: FakeGenerator, **fields: Any) -> StreamedImage:
    return read_image_stream(await stream(generator, **fields), "image_generation")


def pixels(event: dict[str, Any]) -> npt.NDArray[np.uint8]:
    return pixels_of(base64.b64decode(event["b64_json"], validate=True))


@pytest.mark.parametrize("num_partial", [None, 0, 1, 3])
async def test_previews_come_before_the_image(num_partial: int | None) -> None:
    generator = painter()
    image = await streamed(generator, seed=7, size="48x32", partial_images=num_partial)
    output = ImageOutput(ImageSize(48, 32), 7, num_partial_images=num_partial or 0)
    assert generator.last_request.image == output
    assert len(image.partial) == output.num_partial_images
    for index, event in enumerate(image.partial):
        np.testing.assert_array_equal(pixels(event), preview_of(output, index))
    np.testing.assert_array_equal(pixels(image.completed), image_of(output))
    assert {(event["size"], event["output_format"], event["background"]) for event in image.events} == {
        ("48x32", "png", "opaque")
    }


async def test_a_stream_ends_with_the_file_of_an_answer_without_stream() -> None:
    async with http_client(app_of(painter())) as client:
        whole = await client.post(IMAGES_URL, json={"prompt": PROMPT, "seed": 7, "include_parameters": True})
    image = await streamed(painter(), seed=7, include_parameters=True, partial_images=1)
    assert image.completed["b64_json"] == whole.json()["data"][0]["b64_json"]
    assert image.completed["usage"] == whole.json()["usage"]


async def test_previews_are_files_of_the_same_kind() -> None:
    image = await streamed(painter(), partial_images=1, output_format="jpeg", output_compression=80)
    files = [base64.b64decode(event["b64_json"]) for event in image.events]
    assert [Image.open(io.BytesIO(file)).format for file in files] == ["JPEG"] * 2
    assert {event["output_format"] for event in image.events} == {"jpeg"}


async def test_each_step_keeps_the_connection_alive() -> None:
    body = await stream(painter())
    assert body.startswith(STEP.decode())
    assert body.count(STEP.decode()) == NUM_STEPS


async def test_a_wait_for_the_first_step_keeps_the_connection_alive() -> None:
    generator = painter(Hang())
    app = app_of(generator, ApiConfig(sse_keep_alive_s=0.05))
    async with AsgiCall(app, {"prompt": PROMPT, "stream": True}, path=IMAGES_URL) as call:
        await call.body_until(2 * STEP)


@pytest.mark.parametrize("error", [OverloadedError("full"), StageDeadError("painter", "it was killed")])
async def test_a_failure_before_the_first_step_has_its_own_status(error: Exception) -> None:
    generator = painter(error)
    async with http_client(app_of(generator)) as client:
        response = await client.post(IMAGES_URL, json={"prompt": PROMPT, "stream": True})
    assert error_of(response, 503)
    assert [generation.num_closed for generation in generator.generations] == [1]


async def test_a_failure_after_the_first_step_is_the_last_event() -> None:
    broken = CorruptDataError("painter", "samples", "pixels that are NaN")
    generator = painter(ImageProgress(1, 4), broken)
    ((name, payload),) = parse_events(await stream(generator))
    assert name == ""
    assert (payload["error"]["code"], payload["error"]["type"]) == ("corrupt_data", "server_error")
    async with openai_client(app_of(painter(ImageProgress(1, 4), broken))) as client:
        with pytest.raises(openai.APIError, match="NaN"):
            [event async for event in await client.images.generate(prompt=PROMPT, stream=True)]


async def test_no_image_is_sent_of_a_request_that_fails_at_its_end() -> None:
    script = [ImageDone(image_of(ImageOutput())), StageDeadError("painter", "it was killed")]
    ((_, payload),) = parse_events(await stream(painter(ImageProgress(1, 1), *script, finished())))
    assert payload["error"]["code"] == "engine_dead"


async def test_a_client_that_leaves_ends_the_request() -> None:
    generator = painter(ImageProgress(1, 4), Hang())
    async with AsgiCall(app_of(generator), {"prompt": PROMPT, "stream": True}, path=IMAGES_URL) as call:
        await call.body_until(STEP)
        assert generator.generations[0].num_closed == 0
        call.leave()
        await call.task
    assert generator.generations[0].num_closed == 1
