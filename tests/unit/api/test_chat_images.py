"""Chats that ask for an image: `modalities` with "image"."""

import base64
import io
import json
from dataclasses import replace
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image

from omni_server.api.config import ApiConfig
from omni_server.api.streaming import KEEP_ALIVE
from omni_server.errors import InvalidRequestError, StageDeadError
from omni_server.types import Finished, PromptTokens, TextDelta, TextDone, Usage
from omni_server.types.images import ImageDone, ImageOutput, ImageProgress, ImageSize
from tests.unit.api.clients import app_of, chat, error_of, openai_client, post
from tests.unit.api.fake_generator import (
    EDITING_MODEL,
    MODEL,
    TEXT,
    TEXT_ONLY_MODEL,
    FakeGenerator,
    ScriptEntry,
    image_of,
    text_script,
)
from tests.unit.api.sse_validator import parse_frames

DRAWING_MODEL = replace(
    TEXT_ONLY_MODEL,
    outputs=frozenset({"text", "image"}),
    image_sizes=EDITING_MODEL.image_sizes,
    image_features=EDITING_MODEL.image_features,
)
ASKED = ImageOutput(ImageSize(48, 32), seed=7)
BOTH: dict[str, Any] = {"modalities": ["text", "image"]}


USAGE = Usage(PromptTokens(12, 12, 0, 0, 0), text_tokens=5, codec_tokens=0, image_tokens=3 * 2)


def drawing_script() -> list[ScriptEntry]:
    *text, _ = text_script()
    image = ImageDone(image_of(ASKED))
    return [*text, ImageProgress(1, 2), ImageProgress(2, 2), image, Finished("stop", USAGE)]


def drawer(script: list[ScriptEntry] | None = None) -> FakeGenerator:
    return FakeGenerator(DRAWING_MODEL, drawing_script() if script is None else script)


async def answer(generator: FakeGenerator, **fields: Any) -> httpx2.Response:
    return await post(app_of(generator), chat(**fields))


def opened(url: str) -> tuple[str, np.ndarray[Any, Any]]:
    """Type and pixels of a `data:` URL."""
    kind, data = url.split(";base64,")
    return kind.removeprefix("data:"), np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


async def test_an_answer_has_the_text_and_the_image() -> None:
    generator = drawer()
    response = await answer(generator, **BOTH, size="48x32", seed=7)
    assert response.status_code == 200, response.text
    message = response.json()["choices"][0]["message"]
    assert message["content"] == TEXT
    (image,) = message["images"]
    assert (image["type"], image["index"]) == ("image_url", 0)
    kind, pixels = opened(image["image_url"]["url"])
    assert kind == "image/png"
    np.testing.assert_array_equal(pixels, image_of(ASKED))
    assert generator.last_request.image == ASKED
    usage = response.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (12, 11, 23)
    assert usage["completion_tokens_details"]["image_tokens"] == 6


async def test_an_answer_has_the_image_alone_if_no_text_is_asked_for() -> None:
    message = (await answer(drawer(), modalities=["image"])).json()["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["images"]) == 1


async def test_an_answer_without_an_image_has_no_field_for_it() -> None:
    message = (await answer(drawer(text_script()))).json()["choices"][0]["message"]
    assert "images" not in message


async def test_the_official_client_reads_the_image_of_a_stream() -> None:
    generator = drawer()
    text, images = "", []
    async with openai_client(app_of(generator)) as client:
        stream = await client.chat.completions.create(
            model=MODEL.name,
            messages=[{"role": "user", "content": "A lighthouse"}],
            stream=True,
            seed=7,
            extra_body=BOTH | {"size": "48x32", "output_format": "webp"},
        )
        async for chunk in stream:
            delta = chunk.choices[0].delta
            text += delta.content or ""
            images += (delta.model_extra or {}).get("images", [])
    assert text == TEXT
    (image,) = images
    assert (image["type"], image["index"]) == ("image_url", 0)
    kind, pixels = opened(image["image_url"]["url"])
    assert (kind, pixels.shape) == ("image/webp", (32, 48, 3))


async def test_a_stream_of_the_image_alone_keeps_the_connection_alive_while_it_is_drawn() -> None:
    body = (await answer(drawer(), modalities=["image"], stream=True)).text
    assert body.count(KEEP_ALIVE.decode()) == 2, "one for each step"
    chunks = [json.loads(data) for data in parse_frames(body)[:-1]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert all(delta.get("content") is None for delta in deltas)
    assert sum(len(delta.get("images", [])) for delta in deltas) == 1


async def test_several_choices_have_texts_and_images_of_their_own_with_consecutive_seeds() -> None:
    generator = drawer()
    response = await answer(generator, **BOTH, seed=5, n=2)
    assert response.status_code == 200, response.text
    assert [len(choice["message"]["images"]) for choice in response.json()["choices"]] == [1, 1]
    assert response.json()["usage"]["completion_tokens_details"]["image_tokens"] == 2 * 6
    for index, request in enumerate(generator.requests):
        assert request.image == ImageOutput(seed=5 + index)
        assert request.sampling["thinker"].seed == 5 + index


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"modalities": ["image", "smell"]}, "modalities", "invalid_value"),
        ({"modalities": ["audio", "image"]}, "modalities", "unsupported_value"),
        (BOTH | {"n": 2, "stream": True}, "n", "unsupported_value"),
        (BOTH | {"n": 11}, "n", "integer_above_max_value"),
        ({"modalities": ["image"], "logprobs": True}, "logprobs", "unsupported_value"),
        (BOTH | {"partial_images": 1}, "partial_images", "unsupported_value"),
        (BOTH | {"width": 512}, "width", "unsupported_value"),
        (BOTH | {"image_config": {"aspect_ratio": "1:1"}}, "image_config", "unsupported_value"),
        (BOTH | {"extra_body": {"size": "64x64"}}, "extra_body", "unsupported_value"),
        (BOTH | {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_value"),
        (BOTH | {"size": "big"}, "size", "invalid_value"),
        (BOTH | {"output_compression": 5}, "output_compression", "invalid_value"),
        (BOTH | {"num_inference_steps": 9}, "num_inference_steps", "integer_above_max_value"),
    ],
)
async def test_what_no_answer_can_have_is_refused(fields: dict[str, Any], param: str, code: str) -> None:
    generator = drawer()
    response = await post(app_of(generator, ApiConfig(max_image_steps=8)), chat(**fields))
    error = error_of(response)
    assert (error["param"], error["code"]) == (param, code)
    assert generator.requests == []


async def test_a_model_without_images_refuses() -> None:
    error = error_of(await answer(FakeGenerator(TEXT_ONLY_MODEL), **BOTH))
    assert (error["param"], error["code"]) == ("modalities", "unsupported_value")


@pytest.mark.parametrize(
    ("refused", "param"),
    [("num_steps", "num_inference_steps"), ("size", "size"), ("image", "messages")],
)
async def test_errors_of_the_model_name_the_fields_of_the_chat(refused: str, param: str) -> None:
    generator = drawer()
    generator.submit_error = InvalidRequestError("no", param=refused)
    assert error_of(await answer(generator, **BOTH))["param"] == param


async def test_a_failure_after_the_text_is_an_error_of_the_stream() -> None:
    script: list[ScriptEntry] = [TextDelta("Hello", (1,)), TextDone("stop"), StageDeadError("image", "died")]
    assert error_of(await answer(drawer(script), **BOTH), 503)["code"] == "engine_dead"
    body = (await answer(drawer(script), **BOTH, stream=True)).text
    assert '"code":"engine_dead"' in body
    assert "[DONE]" not in body
