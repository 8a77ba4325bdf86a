"""Failures of answers that had begun, in the log: nobody can write lines there."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from omni_server.errors import InvalidRequestError, OmniError, StageError
from omni_server.types import TextDelta
from tests.unit.api.asgi_call import AsgiCall
from tests.unit.api.clients import app_of, chat, http_client, media, post
from tests.unit.api.fake_generator import FakeGenerator, speech_script
from tests.unit.api.realtime.realtime_client import RealtimeClient

TEXT = "bad schema\r\n1970-01-01 00:00:00 INFO forged\u2028line"


async def chat_stream(generator: FakeGenerator) -> None:
    await post(app_of(generator), chat(stream=True))


async def transcription_stream(generator: FakeGenerator) -> None:
    async with http_client(app_of(generator)) as client:
        files = {"file": ("a.wav", media("speech_hello.wav"), "audio/wav")}
        await client.post("/v1/audio/transcriptions", data={"model": "omni", "stream": "true"}, files=files)


async def sound_stream(generator: FakeGenerator) -> None:
    body = {"model": "omni", "input": "Hello.", "voice": "Ethan", "response_format": "pcm"}
    async with AsgiCall(app_of(generator), body, path="/v1/audio/speech") as call:
        await call.task


async def realtime_response(generator: FakeGenerator) -> None:
    async with RealtimeClient(generator) as client:
        await client.opened()
        await client.answer()


@pytest.mark.parametrize("answer", [chat_stream, transcription_stream, sound_stream, realtime_response])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (InvalidRequestError(TEXT, code="invalid_schema"), "invalid_schema"),
        (StageError("talker", TEXT), "forged\\u2028line"),
    ],
)
async def test_a_failure_is_one_line_and_holds_nothing_that_the_client_sent(
    answer: Callable[[FakeGenerator], Awaitable[None]],
    error: OmniError,
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun = speech_script()[:4] if answer is sound_stream else [TextDelta("Hello", (1,))]
    await asyncio.wait_for(answer(FakeGenerator(script=[*begun, error])), 10)
    (line,) = [record.getMessage() for record in caplog.records if " failed" in record.getMessage()]
    assert told in line
    assert len(line.splitlines()) == 1
    assert ("forged" in line) == (error.status >= 500)
