"""Streamed answers, byte by byte and through the official client."""

import httpx2
import numpy as np
import pytest
from openai import APIError

from omni_server.api.config import ApiConfig
from omni_server.errors import DeadlineExceededError, InvalidRequestError, OverloadedError, StageDeadError
from omni_server.types import AudioDelta, TextDelta
from tests.unit.api.asgi_call import AsgiCall
from tests.unit.api.clients import SPEECH, app_of, chat, error_of, openai_client, post
from tests.unit.api.fake_generator import (
    PIECES,
    SAMPLES,
    TEXT,
    FakeGenerator,
    Hang,
    ScriptEntry,
    finished,
    speech_script,
    text_script,
)
from tests.unit.api.sse_validator import parse_frames, read_stream

PCM16 = SPEECH | {"audio": {"voice": "Ethan", "format": "pcm16"}, "stream": True}
WITH_USAGE = {"stream_options": {"include_usage": True}}


async def stream(generator: FakeGenerator, **fields: object) -> httpx2.Response:
    response = await post(app_of(generator), chat(**fields))
    assert response.status_code == 200, response.text
    return response


async def test_headers_tell_proxies_not_to_collect_the_stream() -> None:
    headers = (await stream(FakeGenerator(), stream=True)).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-request-id"]
    assert "content-length" not in headers


async def test_text_stream_is_role_then_content_then_finish() -> None:
    answer = read_stream((await stream(FakeGenerator(), stream=True)).text)
    assert answer.chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert answer.text == TEXT
    assert answer.audio_id is None
    assert answer.finish_reason == "stop"
    assert all(chunk["choices"][0]["delta"].get("content") for chunk in answer.chunks[1:-1])


async def test_text_stream_carries_length_and_usage() -> None:
    response = await stream(FakeGenerator(script=text_script("length")), stream=True, **WITH_USAGE)
    answer = read_stream(response.text, include_usage=True)
    assert answer.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == 6


async def test_speech_stream_interleaves_transcript_and_samples() -> None:
    answer = read_stream((await stream(FakeGenerator(), **PCM16, **WITH_USAGE)).text, include_usage=True)
    assert (answer.transcript, answer.text) == (TEXT, "")
    np.testing.assert_allclose(np.frombuffer(answer.data, "<i2") / 32768, SAMPLES, atol=1 / 32_000)
    deltas = [chunk["choices"][0]["delta"] for chunk in answer.chunks[:-1]]
    assert deltas[0] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "audio": {"id": answer.audio_id, "transcript": ""},
    }
    kinds = [next(iter(delta["audio"])) for delta in deltas[1:-1]]
    assert kinds[0] == "transcript"
    assert kinds[-1] == "expires_at"
    assert kinds.index("data") < len(kinds) - 1 - kinds[::-1].index("transcript")


async def test_short_pieces_wait_until_they_fill_a_delta() -> None:
    answer = read_stream((await stream(FakeGenerator(), **PCM16)).text)
    audio = [chunk["choices"][0]["delta"].get("audio", {}) for chunk in answer.chunks]
    # The pieces of two samples and of one may not make a delta of their own.
    assert 3 <= sum("data" in part for part in audio) <= len(PIECES) + 1


@pytest.mark.parametrize("audio_format", ["pcm16", "wav"])
async def test_speech_stream_without_samples_is_complete(audio_format: str) -> None:
    script: list[ScriptEntry] = [TextDelta("a", (1,)), finished()]
    fields = PCM16 | {"audio": {"voice": "Ethan", "format": audio_format}}
    answer = read_stream((await stream(FakeGenerator(script=script), **fields)).text)
    assert len(answer.data) == {"pcm16": 0, "wav": 44}[audio_format]


async def test_audio_of_a_stream_can_be_referred_to_later() -> None:
    app = app_of(FakeGenerator())
    answer = read_stream((await post(app, chat(**PCM16))).text)
    body = chat()
    body["messages"].append({"role": "assistant", "audio": {"id": answer.audio_id}})
    assert (await post(app, body)).status_code == 200


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (
            InvalidRequestError("too long", param="messages", code="context_length_exceeded"),
            400,
            "context_length_exceeded",
        ),
        (OverloadedError("full"), 503, "server_overloaded"),
        (StageDeadError("talker", "gone"), 503, "engine_dead"),
    ],
)
async def test_refusal_at_submission_is_no_stream(failure: APIError, status: int, code: str) -> None:
    generator = FakeGenerator()
    generator.submit_error = failure
    assert error_of(await post(app_of(generator), chat(stream=True)), status)["code"] == code


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (DeadlineExceededError("too late"), "request_timeout"),
        (StageDeadError("code2wav", "gone"), "engine_dead"),
        (RuntimeError("/secret/path"), "internal_error"),
    ],
)
async def test_failure_in_a_stream_is_its_last_frame(failure: Exception, code: str) -> None:
    generator = FakeGenerator(script=[TextDelta("a", (1,)), failure])
    response = await stream(generator, stream=True, **WITH_USAGE)
    payloads = parse_frames(response.text)
    assert len(payloads) == 3
    assert f'"code":"{code}"' in payloads[-1]
    assert payloads[-1].startswith('{"error":{')
    assert "secret" not in response.text
    assert 'finish_reason":"' not in response.text
    assert generator.generations[0].num_closed == 1


async def test_waveform_that_is_not_finite_fails_the_stream() -> None:
    script: list[ScriptEntry] = [AudioDelta(0, np.full(10, np.nan, np.float32)), finished()]
    response = await stream(FakeGenerator(script=script), **PCM16)
    assert '"type":"server_error"' in parse_frames(response.text)[-1]


async def test_official_client_raises_for_a_failure_in_a_stream() -> None:
    generator = FakeGenerator(script=[TextDelta("a", (1,)), StageDeadError("thinker", "gone")])
    async with openai_client(app_of(generator)) as client:
        chunks = await client.chat.completions.create(**chat(stream=True))
        with pytest.raises(APIError, match="thinker") as caught:
            [chunk async for chunk in chunks]
    assert caught.value.code == "engine_dead"


async def test_silence_is_filled_with_comments() -> None:
    generator = FakeGenerator(script=[TextDelta("a", (1,)), Hang()])
    app = app_of(generator, ApiConfig(sse_keep_alive_s=0.01))
    async with AsgiCall(app, chat(stream=True)) as call:
        body = await call.body_until(b": keep-alive\n\n: keep-alive\n\n")
    assert parse_frames(body.decode())[1].count('"content":"a"') == 1


async def test_role_is_sent_before_the_first_event() -> None:
    async with AsgiCall(app_of(FakeGenerator(script=[Hang()])), chat(stream=True)) as call:
        assert (await call.message())["status"] == 200
        assert b'"role":"assistant"' in await call.body_until(b"\n\n")


async def test_each_event_leaves_as_soon_as_it_is_there() -> None:
    generator = FakeGenerator(script=[*speech_script()[:5], Hang()])
    async with AsgiCall(app_of(generator), chat(**PCM16)) as call:
        assert b'"data":"' in await call.body_until(b'"data":"')
