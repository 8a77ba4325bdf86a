"""Chats that ask for an image: `modalities` with "image"."""

import base64
import io
import json
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image

from omni_server.api.config import ApiConfig
from omni_server.api.streaming import KEEP_ALIVE
from omni_server.errors import InvalidRequestError
from omni_server.types import Finished, PromptTokens, Usage
from omni_server.types.images import ImageDone, ImageOutput, ImageProgress, ImageSize
from tests.unit.api.clients import app_of, chat, error_of, openai_client, post
from tests.unit.api.fake_generator import (
    EDITING_MODEL,
    MODEL,
    TEXT_ONLY_MODEL,
    FakeGenerator,
    ScriptEntry,
    image_of,
)
from tests.unit.api.sse_validator import parse_frames

ASKED = ImageOutput(ImageSize(48, 32), seed=7)
IMAGE: dict[str, Any] = {"modalities": ["image"]}
USAGE = Usage(PromptTokens(12, 0, 0, 12, 0), text_tokens=0, codec_tokens=0, image_tokens=3 * 2)


def drawing_script() -> list[ScriptEntry]:
    image = ImageDone(image_of(ASKED))
    return [ImageProgress(1, 2), ImageProgress(2, 2), image, Finished("stop", USAGE)]


def drawer(script: list[ScriptEntry] | None = None) -> FakeGenerator:
    return FakeGenerator(EDITING_MODEL, drawing_script() if script is None else script)


async def answer(generator: FakeGenerator, **fields: Any) -> httpx2.Response:
    return await post(app_of(generator), chat(**fields))


def opened(url: str) -> tuple[str, np.ndarray[Any, Any]]:
    """Type and pixels of a `data:` URL."""
    kind, data = url.split(";base64,")
    return kind.removeprefix("data:"), np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


async def test_an_answer_without_an_image_has_no_field_for_it() -> None:
    message = (await answer(FakeGenerator())).json()["choices"][0]["message"]
    assert "images" not in message


async def test_the_official_client_reads_the_image_of_a_stream() -> None:
    generator = drawer()
    contents, images = [], []
    async with openai_client(app_of(generator)) as client:
        stream = await client.chat.completions.create(
            model=MODEL.name,
            messages=[{"role": "user", "content": "A lighthouse"}],
            stream=True,
            seed=7,
            extra_body=IMAGE | {"size": "48x32", "output_format": "webp"},
        )
        async for chunk in stream:
            delta = chunk.choices[0].delta
            contents.append(delta.content)
            images += (delta.model_extra or {}).get("images", [])
    assert not any(contents)
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


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"modalities": ["audio", "image"]}, "modalities", "unsupported_value"),
        (IMAGE | {"n": 2, "stream": True}, "n", "unsupported_value"),
        (IMAGE | {"n": 11}, "n", "integer_above_max_value"),
        ({"modalities": ["image"], "logprobs": True}, "logprobs", "unsupported_value"),
        (IMAGE | {"partial_images": 1}, "partial_images", "unsupported_value"),
        (IMAGE | {"width": 512}, "height", "missing_required_parameter"),
        (IMAGE | {"steps": 4}, "steps", "unsupported_value"),
        (IMAGE | {"image_config": {"aspect_ratio": "1:1"}}, "image_config", "unsupported_value"),
        (IMAGE | {"extra_body": {"size": "64x64"}}, "extra_body", "unsupported_value"),
        (IMAGE | {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_value"),
        (IMAGE | {"size": "big"}, "size", "invalid_value"),
        (IMAGE | {"output_compression": 5}, "output_compression", "invalid_value"),
        (IMAGE | {"num_inference_steps": 9}, "num_inference_steps", "integer_above_max_value"),
    ],
)
async def test_what_no_answer_can_have_is_refused(fields: dict[str, Any], param: str, code: str) -> None:
    generator = drawer()
    response = await post(app_of(generator, ApiConfig(max_image_steps=8)), chat(**fields))
    error = error_of(response)
    assert (error["param"], error["code"]) == (param, code)
    assert generator.requests == []


async def test_a_model_without_images_refuses() -> None:
    error = error_of(await answer(FakeGenerator(TEXT_ONLY_MODEL), **IMAGE))
    assert (error["param"], error["code"]) == ("modalities", "unsupported_value")


@pytest.mark.parametrize(
    ("refused", "param"),
    [("num_steps", "num_inference_steps"), ("size", "size"), ("image", "messages")],
)
async def test_errors_of_the_model_name_the_fields_of_the_chat(refused: str, param: str) -> None:
    generator = drawer()
    generator.submit_error = InvalidRequestError("no", param=refused)
    assert error_of(await answer(generator, **IMAGE))["param"] == param
