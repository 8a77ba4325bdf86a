"""Chats with a model that only draws, such as a Diffusers pipeline."""

import asyncio
from typing import Any

import httpx2
import numpy as np
import pytest

from omni_server.api.config import ApiConfig
from omni_server.api.media_loader import LARGEST_IN_MEMORY
from omni_server.errors import StageDeadError
from omni_server.media.limits import MediaLimits
from omni_server.types import ChatMessage, ImagePart, TextPart
from omni_server.types.images import ImageOutput, ImageProgress, ImageSize
from tests.unit.api.asgi_call import AsgiCall
from tests.unit.api.clients import app_of, chat, data_url, error_of, openai_client, post
from tests.unit.api.fake_generator import (
    EDITING_MODEL,
    IMAGE_MODEL,
    IMAGE_PROMPT,
    MODEL,
    FakeGenerator,
    Hang,
    image_of,
)
from tests.unit.api.test_chat_images import opened
from tests.unit.api.test_image_edits import DARK, LIGHT, picture

QUESTION = [{"role": "user", "content": "A lighthouse"}]


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data, "image/png")}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


async def answer(generator: FakeGenerator, content: Any = "A lighthouse", **fields: Any) -> httpx2.Response:
    return await post(app_of(generator), chat(content, **fields))


@pytest.mark.parametrize("fields", [{}, {"modalities": ["image"]}])
async def test_the_official_client_gets_an_image_without_any_extension(fields: dict[str, Any]) -> None:
    generator = FakeGenerator(EDITING_MODEL)
    async with openai_client(app_of(generator)) as client:
        completion = await client.chat.completions.create(
            model=MODEL.name,
            messages=[{"role": "user", "content": "A lighthouse"}],
            seed=7,
            extra_body=fields,
        )
    (choice,) = completion.choices
    assert (choice.message.content, choice.finish_reason) == (None, "stop")
    assert choice.message.model_extra is not None
    (image,) = choice.message.model_extra["images"]
    kind, pixels = opened(image["image_url"]["url"])
    assert kind == "image/png"
    np.testing.assert_array_equal(pixels, image_of(ImageOutput(seed=7)))
    assert generator.last_request.messages == (ChatMessage("user", (TextPart("A lighthouse"),)),)
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (IMAGE_PROMPT.image, 4)


async def test_options_are_those_of_the_image_endpoints() -> None:
    generator = FakeGenerator(EDITING_MODEL)
    options = {
        "negative_prompt": "rain",
        "num_inference_steps": 3,
        "guidance_scale": 2.5,
        "true_cfg_scale": 4,
    }
    response = await answer(generator, size="48x32", seed=7, n=2, **options)
    assert response.status_code == 200, response.text
    first = ImageOutput(ImageSize(48, 32), 7, "rain", 3, 2.5, 4.0)
    assert [request.image for request in generator.requests] == [
        first,
        ImageOutput(ImageSize(48, 32), 8, "rain", 3, 2.5, 4.0),
    ]
    choices = response.json()["choices"]
    for choice, seed in zip(choices, (7, 8), strict=True):
        _, pixels = opened(choice["message"]["images"][0]["image_url"]["url"])
        np.testing.assert_array_equal(pixels, image_of(ImageOutput(ImageSize(48, 32), seed)))


async def test_images_of_the_seed_minus_one_have_seeds_of_their_own() -> None:
    generator = FakeGenerator(EDITING_MODEL)
    assert (await answer(generator, width=48, height=32, seed=-1, n=2)).status_code == 200
    assert [request.image for request in generator.requests] == [ImageOutput(ImageSize(48, 32))] * 2


async def test_the_last_user_message_is_drawn_and_its_images_are_edited() -> None:
    generator = FakeGenerator(EDITING_MODEL)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [image_part(LIGHT), text_part("A lighthouse")]},
        {"role": "assistant", "content": "Here it is."},
        {"role": "user", "content": [text_part("Make it night"), image_part(DARK)]},
        {"role": "assistant", "content": "Well,"},
    ]
    response = await post(app_of(generator), {"model": "omni", "messages": messages})
    assert response.status_code == 200, response.text
    (message,) = generator.last_request.messages
    text, image = message.content
    assert text == TextPart("Make it night")
    assert isinstance(image, ImagePart)
    np.testing.assert_array_equal(image.pixels, picture(20))


@pytest.mark.parametrize(
    ("model", "fields", "param", "code"),
    [
        (EDITING_MODEL, {"modalities": ["text"]}, "modalities", "unsupported_value"),
        (EDITING_MODEL, {"modalities": ["text", "image"]}, "modalities", "unsupported_value"),
        (EDITING_MODEL, {"modalities": ["audio"]}, "modalities", "unsupported_value"),
        (EDITING_MODEL, {"model": "other"}, "model", "model_not_found"),
        (EDITING_MODEL, {"n": 2, "stream": True}, "n", "unsupported_value"),
        (EDITING_MODEL, {"messages": [{"role": "system", "content": "Draw"}]}, "messages", "invalid_value"),
        (EDITING_MODEL, {"messages": [{"role": "user", "content": " "}]}, "messages", "empty_string"),
        (
            EDITING_MODEL,
            {"messages": [{"role": "user", "content": "a" * 32_001}]},
            "messages",
            "string_above_max_length",
        ),
        (
            EDITING_MODEL,
            {
                "messages": [
                    *QUESTION,
                    {"role": "user", "content": [text_part("Edit"), *[image_part(DARK)] * 3]},
                ]
            },
            "messages",
            "too_many_media",
        ),
        (
            IMAGE_MODEL,
            {"messages": [*QUESTION, {"role": "user", "content": [text_part("Edit"), image_part(DARK)]}]},
            "messages[1].content[1].type",
            "unsupported_value",
        ),
        (
            EDITING_MODEL,
            {"messages": [{"role": "user", "content": [text_part("Edit"), image_part(b"no image")]}]},
            "messages[0].content[1].image_url.url",
            "invalid_image",
        ),
    ],
)
async def test_what_it_cannot_do_is_refused(
    model: Any, fields: dict[str, Any], param: str, code: str
) -> None:
    generator = FakeGenerator(model)
    error = error_of(await post(app_of(generator), chat() | fields), 404 if param == "model" else 400)
    assert (error["param"], error["code"]) == (param, code)
    assert generator.requests == []


async def test_edits_are_limited_to_the_pixels_of_one_large_image() -> None:
    generator = FakeGenerator(EDITING_MODEL)
    config = ApiConfig(media_limits=MediaLimits(max_image_pixels=20 * 10))
    content = [text_part("Edit"), image_part(DARK)]
    assert (await post(app_of(generator, config), chat(content))).status_code == 200
    error = error_of(await post(app_of(generator, config), chat(content, n=2)))
    assert (error["param"], error["code"]) == ("messages", "invalid_image")


@pytest.mark.parametrize("stream", [False, True])
async def test_images_of_a_client_that_leaves_do_not_keep_their_room(stream: bool) -> None:
    generator = FakeGenerator(EDITING_MODEL, [ImageProgress(1, 2), Hang()])
    limits = MediaLimits(max_image_pixels=20 * 10)
    config = ApiConfig(media_limits=limits, max_upload_seconds=0.001, media_queue_timeout_s=0.5)
    app = app_of(generator, config)
    body = chat([text_part("Edit"), image_part(DARK)], stream=stream)
    for number in range(1, LARGEST_IN_MEMORY + 2):
        async with AsgiCall(app, body), asyncio.timeout(10):
            while len(generator.generations) < number:  # noqa: ASYNC110 - the event is of the first only
                await asyncio.sleep(0)
    assert [generation.num_closed for generation in generator.generations] == [1] * number


async def test_a_pipeline_that_dies_is_an_error_of_the_api() -> None:
    generator = FakeGenerator(EDITING_MODEL, [ImageProgress(1, 2), StageDeadError("image", "died")])
    assert error_of(await answer(generator), 503)["code"] == "engine_dead"
    body = (await answer(generator, stream=True)).text
    assert '"code":"engine_dead"' in body
    assert "[DONE]" not in body
    assert [generation.num_closed > 0 for generation in generator.generations] == [True, True]
