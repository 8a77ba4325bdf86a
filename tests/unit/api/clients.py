"""Clients of the application under test, without a socket in between."""

import base64
import io
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import soundfile
from fastapi import FastAPI
from openai import AsyncOpenAI

from omni_server.api.answer_stream import AnswerStream
from omni_server.api.app import create_app
from omni_server.api.config import ApiConfig
from omni_server.api.state import ServerState
from omni_server.types import ChatMessage, OmniRequest
from tests.unit.api.fake_generator import FakeGenerator, ScriptEntry
from tests.unit.api.schema import check_error

SPEECH: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "wav"}}
URL = "/v1/chat/completions"


def app_of(generator: FakeGenerator | None, config: ApiConfig | None = None) -> FastAPI:
    return create_app(ServerState(generator), config if config is not None else ApiConfig())


@asynccontextmanager
async def answer_of(
    state: ServerState, *scripts: Sequence[ScriptEntry], generator: FakeGenerator | None = None
) -> AsyncIterator[AnswerStream]:
    """An answer whose generations, those of `generator`, follow the scripts."""
    generator = generator or FakeGenerator()
    async with aclosing(AnswerStream(generator, state, "a")) as answer:
        for index, generator.script in enumerate(scripts):
            await answer.submit(OmniRequest(f"a-{index}", (ChatMessage("user", ()),)))
        yield answer


def http_client(app: FastAPI, **options: Any) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost", **options)


def openai_client(app: FastAPI) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url="http://localhost/v1", api_key="EMPTY", max_retries=0, http_client=http_client(app)
    )


def chat(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    """A request body; `content` is the user's."""
    return {"model": "omni", "messages": [{"role": "user", "content": content}], **fields}


def response_body(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    """The body of a request for a response."""
    return {"model": "omni", "input": content, **fields}


def completion_body(prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
    """The body of a request for a completion."""
    return {"model": "omni", "prompt": prompt, **fields}


@dataclass(frozen=True)
class Endpoint:
    """Where the model can be asked for an answer, and a body for it."""

    url: str
    body: Callable[..., dict[str, Any]]


ENDPOINTS = [
    Endpoint(URL, chat),
    Endpoint("/v1/responses", response_body),
    Endpoint("/v1/completions", completion_body),
]
each_endpoint = pytest.mark.parametrize("endpoint", ENDPOINTS, ids=[endpoint.url for endpoint in ENDPOINTS])


async def post(app: FastAPI, body: Any, headers: Mapping[str, str] | None = None) -> httpx2.Response:
    async with http_client(app) as client:
        return await client.post(URL, json=body, headers=headers)


async def request_for(content: Any = "hi", **fields: Any) -> OmniRequest:
    """What reaches the generator of a chat that is answered."""
    generator = FakeGenerator()
    response = await post(app_of(generator), chat(content, **fields))
    assert response.status_code == 200, response.text
    return generator.last_request


def error_of(response: httpx2.Response, status: int = 400) -> dict[str, Any]:
    """The error of a response, after all that must hold for every error."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    check_error(body)
    error: dict[str, Any] = body["error"]
    assert len(error["message"]) < 1100
    return error


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, media_type: str = "") -> str:
    return f"data:{media_type};base64,{base64_of(data)}"


def tone(container: str = "WAV", subtype: str | None = None, num_samples: int = 12_000) -> bytes:
    """A sound file of 440 Hz at 24 kHz."""
    file = io.BytesIO()
    samples = 0.3 * np.sin(2 * np.pi * 440 * np.arange(num_samples) / 24_000)
    soundfile.write(file, samples.astype(np.float32), 24_000, format=container, subtype=subtype)
    return file.getvalue()


def media(name: str) -> bytes:
    return (Path(__file__).parents[2] / "data" / "media" / name).read_bytes()
