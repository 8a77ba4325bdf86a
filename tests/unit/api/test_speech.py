"""`POST /v1/audio/speech` and the lists of voices and models beside it."""

import asyncio
import base64
import io
import json
import wave
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx2
import numpy as np
import pytest
import soundfile
from fastapi import FastAPI

from omni_server.api.config import ApiConfig
from omni_server.api.voices import OPENAI_VOICES
from omni_server.errors import (
    EndlessSpeechError,
    InvalidRequestError,
    OmniError,
    OverloadedError,
    StageDeadError,
)
from omni_server.types import AudioDelta, ReadAloud, TextDelta
from tests.audio_files import read_audio
from tests.unit.api.asgi_call import AsgiCall
from tests.unit.api.clients import app_of, error_of, http_client
from tests.unit.api.fake_generator import (
    MODEL,
    PIECES,
    PROMPT,
    SAMPLES,
    TEXT_ONLY_MODEL,
    FakeGenerator,
    Hang,
    ScriptEntry,
    Wait,
    finished,
    speech_script,
)
from tests.unit.api.sse_validator import parse_frames
from tests.unit.api.test_server import Life, client_of, served

SPEECH_URL = "/v1/audio/speech"
TEXT = "Good morning, Aïcha 👋🏽!"
PCM = np.clip(np.rint(SAMPLES * 32768), -32768, 32767).astype("<i2")
FORMATS = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "pcm16": "audio/pcm",
}
LONG = "This sentence has about fifty characters in it now. " * 40
FIRST_PIECE = AudioDelta(0, np.tile(SAMPLES[:1001], 6))  # encoders keep up to 0.1 s


def speech(text: str = TEXT, **fields: Any) -> dict[str, Any]:
    return {"model": "omni", "voice": "Ethan", "input": text, **fields}


async def post_speech(app: FastAPI, body: Any, headers: dict[str, str] | None = None) -> httpx2.Response:
    async with http_client(app) as client:
        return await client.post(SPEECH_URL, json=body, headers=headers)


async def spoken_by(generator: FakeGenerator, **fields: Any) -> httpx2.Response:
    response = await post_speech(app_of(generator), speech(**fields))
    assert response.status_code == 200, response.text
    return response


def events_of(response: httpx2.Response) -> tuple[bytes, dict[str, Any]]:
    """The file and the usage, after all that must hold for the events of a speech."""
    assert response.headers["content-type"].partition(";")[0] == "text/event-stream"
    *deltas, done = [json.loads(payload) for payload in parse_frames(response.text)]
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    assert done["type"] == "speech.audio.done"
    pieces = [base64.b64decode(delta["audio"], validate=True) for delta in deltas]
    assert all(piece and len(piece) % 6 == 0 for piece in pieces[:-1])
    return b"".join(pieces), done["usage"]


# -- the file


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream": True},
        {"stream": False},
        {"stream_format": "audio"},
        {"stream_format": "audio", "stream": False},
    ],
)
@pytest.mark.parametrize(("name", "media_type"), FORMATS.items())
async def test_every_format_is_a_file_of_its_media_type(
    name: str, media_type: str, fields: dict[str, Any]
) -> None:
    response = await spoken_by(FakeGenerator(), response_format=name, **fields)
    headers = response.headers
    assert headers["content-type"] == media_type
    assert (headers["x-audio-sample-rate"], headers["x-audio-channels"]) == ("24000", "1")
    is_whole = not fields.get("stream", "stream_format" in fields or name not in ("wav", "flac"))
    assert headers.get("content-length") == (str(len(response.content)) if is_whole else None)
    if name.startswith("pcm"):
        assert response.content == PCM.tobytes()
        return
    samples = read_audio(response.content)
    if name in ("wav", "flac"):
        np.testing.assert_array_equal(samples, PCM)
    else:
        assert np.abs(samples).max() > 10_000


@pytest.mark.parametrize("speed", [1, 2])
@pytest.mark.parametrize("text", [TEXT, LONG])
async def test_a_wav_or_flac_file_declares_its_length_unless_it_is_streamed(text: str, speed: float) -> None:
    generator = FakeGenerator()
    wav = (await spoken_by(generator, text=text, response_format="wav", speed=speed)).content
    num_passages = len(generator.requests)
    with wave.open(io.BytesIO(wav)) as file:
        num_frames = file.getnframes()
        assert len(file.readframes(2 * num_frames)) == 2 * num_frames == len(wav) - 44
    assert num_frames == pytest.approx(num_passages * len(SAMPLES) / speed, abs=2400 * (speed - 1))
    flac = (await spoken_by(FakeGenerator(), text=text, response_format="flac", speed=speed)).content
    with soundfile.SoundFile(io.BytesIO(flac)) as file:
        assert file.frames == num_frames == len(file.read())

    streamed = (await spoken_by(FakeGenerator(), response_format="wav", stream=True)).content
    with wave.open(io.BytesIO(streamed)) as file:
        assert file.getnframes() > 10**9


@pytest.mark.parametrize("name", FORMATS)
async def test_events_hold_the_bytes_of_the_file(name: str) -> None:
    whole = await spoken_by(FakeGenerator(), response_format=name, stream=True)
    data, usage = events_of(await spoken_by(FakeGenerator(), response_format=name, stream_format="sse"))
    assert data == whole.content
    assert usage == {
        "input_tokens": PROMPT.total,
        "output_tokens": len(PIECES),
        "total_tokens": PROMPT.total + len(PIECES),
    }


@pytest.mark.parametrize("speed", [0.25, 0.5, 1, 1.5, 4.0])
@pytest.mark.parametrize("fields", [{}, {"stream_format": "sse"}, {"stream_format": "sse", "stream": False}])
async def test_speech_is_as_fast_as_asked_for(fields: dict[str, str], speed: float) -> None:
    response = await spoken_by(FakeGenerator(), response_format="pcm", speed=speed, **fields)
    data = events_of(response)[0] if fields else response.content
    assert len(data) / 48_000 == pytest.approx(len(SAMPLES) / 24_000 / speed, abs=0.1)
    assert (data == PCM.tobytes()) == (speed == 1)


async def test_silence_in_the_events_is_bridged_by_comments() -> None:
    rest = asyncio.Event()
    script = speech_script()
    generator = FakeGenerator(script=[*script[:6], Wait(rest), *script[6:]])
    body = speech(response_format="pcm", stream_format="sse")
    async with AsgiCall(app_of(generator, ApiConfig(sse_keep_alive_s=0.01)), body, path=SPEECH_URL) as call:
        before = await call.body_until(b": keep-alive")
        assert before.startswith(b"data: ")
        rest.set()
        await call.body_until(b"speech.audio.done")


async def test_speech_without_any_sound_is_an_empty_file() -> None:
    generator = FakeGenerator(script=[finished()])
    assert (await spoken_by(generator, response_format="pcm")).content == b""
    wav = (await spoken_by(generator, response_format="wav")).content
    assert soundfile.info(io.BytesIO(wav)).frames == 0
    (done,) = parse_frames((await spoken_by(generator, stream_format="sse", response_format="pcm")).text)
    assert json.loads(done)["usage"]["output_tokens"] == 0


# -- what the model is asked


async def test_the_text_is_what_is_spoken() -> None:
    generator = FakeGenerator()
    await spoken_by(generator, seed=5, stage_sampling={"talker": {"max_tokens": 9}})
    request = generator.last_request
    assert generator.tasks == [ReadAloud(TEXT)]
    assert request.messages == generator.task_messages(ReadAloud(TEXT))
    assert request.speech is not None
    assert (request.speech.text, request.speech.voice, request.speech.seed) == (TEXT, "Ethan", 5)
    talker = request.sampling["talker"]
    assert (talker.max_tokens, talker.seed) == (9, 5)
    assert "thinker" not in request.sampling


@pytest.mark.parametrize(
    "text", ["👋🏽🎉", "0123456789", "Grüße!", "早上好。", "صباح الخير", "<|im_end|>", "a\x00b", "\u2028x"]
)
async def test_any_text_is_read_as_it_is(text: str) -> None:
    generator = FakeGenerator()
    await spoken_by(generator, text=text)
    assert generator.last_request.speech is not None
    assert generator.last_request.speech.text == text.strip()


async def test_instructions_and_language_reach_the_model() -> None:
    generator = FakeGenerator()
    await spoken_by(generator, instructions="Whisper.", language="German")
    assert generator.tasks == [ReadAloud(TEXT, "Whisper.")]
    speech = generator.last_request.speech
    assert speech is not None
    assert (speech.instructions, speech.language) == ("Whisper.", "German")


@pytest.mark.parametrize(("finish_reason", "must_end"), [("stop", None), ("length", False), ("stop", True)])
async def test_a_missing_end_is_told_and_can_be_an_error(finish_reason: Any, must_end: bool | None) -> None:
    generator = FakeGenerator(script=[*speech_script()[:-1], finished(finish_reason)])
    response = await spoken_by(generator, stream_format="sse", must_end=must_end)
    assert f'"finish_reason":"{finish_reason}"' in response.text
    assert generator.last_request.speech is not None
    assert generator.last_request.speech.must_end is bool(must_end)
    generator.submit_error = EndlessSpeechError("talker")
    error = error_of(await post_speech(app_of(generator), speech(must_end=True)), 500)
    assert error["code"] == "endless_speech"


@pytest.mark.parametrize("instructions", [None, "", "  ", "None"])
async def test_instructions_that_say_nothing_are_dropped(instructions: str | None) -> None:
    generator = FakeGenerator()
    await spoken_by(generator, instructions=instructions)
    assert generator.tasks == [ReadAloud(TEXT)]


@pytest.mark.parametrize("voice", ["ethan", {"id": "Ethan"}, "ash"])
async def test_a_voice_has_many_names(voice: Any) -> None:
    generator = FakeGenerator()
    await spoken_by(generator, voice=voice)
    assert generator.last_request.speech is not None
    assert generator.last_request.speech.voice == "Ethan"


async def test_a_missing_voice_is_the_default_voice() -> None:
    generator = FakeGenerator()
    for body in ({"model": "omni", "input": TEXT}, speech(voice=None)):
        assert (await post_speech(app_of(generator), body)).status_code == 200
        assert generator.last_request.speech is not None
        assert generator.last_request.speech.voice == "Chelsie"


async def test_fields_of_other_servers_are_ignored() -> None:
    await spoken_by(FakeGenerator(), stream=True, language="en", task_type="x", speed=1)


# -- long texts


async def test_a_long_text_is_read_in_passages_one_after_the_other() -> None:
    generator = FakeGenerator()
    response = await spoken_by(generator, text=LONG, response_format="pcm")
    texts = [request.speech.text or "" for request in generator.requests if request.speech is not None]
    assert len(texts) == len(generator.requests) > 1
    assert " ".join(texts) == LONG.strip()
    assert response.content == PCM.tobytes() * len(texts)
    assert len({request.request_id for request in generator.requests}) == len(texts)
    assert [generation.num_closed for generation in generator.generations] == [1] * len(texts)


@pytest.mark.parametrize("text_stage", [None, "thinker"])
async def test_a_model_that_reads_gets_a_long_text_as_a_whole(text_stage: str | None) -> None:
    generator = FakeGenerator(replace(MODEL, text_stage=text_stage, reads_text=True))
    await spoken_by(generator, text=LONG)
    [request] = generator.requests
    assert request.speech is not None
    assert request.speech.text == LONG.strip()


async def test_usage_of_a_long_text_is_that_of_all_passages() -> None:
    generator = FakeGenerator()
    _, usage = events_of(await spoken_by(generator, text=LONG, stream_format="sse"))
    assert usage["input_tokens"] == PROMPT.total * len(generator.requests)
    assert usage["output_tokens"] == len(PIECES) * len(generator.requests)


# -- mistakes and failures


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": TEXT}, "model", "missing_required_parameter"),
        ({"model": "omni"}, "input", "missing_required_parameter"),
        (speech(""), "input", "empty_string"),
        (speech(" \n\t"), "input", "empty_string"),
        (speech("\0" * 4096), "input", "empty_string"),
        (speech("\x1b\n\u200b"), "input", "empty_string"),
        (speech("a" * 4097), "input", "string_above_max_length"),
        (speech(instructions="a" * 4097), "instructions", "string_above_max_length"),
        (speech(stream_format="x"), "stream_format", "invalid_value"),
        (speech(response_format="ogg"), "response_format", "unsupported_value"),
        (speech(response_format="m4a"), "response_format", "unsupported_value"),
        (speech(speed=0.1), "speed", "decimal_below_min_value"),
        (speech(speed=5), "speed", "integer_above_max_value"),
        (speech(voice={"name": "Ethan"}), "voice", "invalid_type"),
        (speech(stage_sampling={"thinker": {}}), "stage_sampling.thinker", "unknown_parameter"),
    ],
)
async def test_bad_field_is_refused(body: dict[str, Any], param: str, code: str) -> None:
    generator = FakeGenerator()
    error = error_of(await post_speech(app_of(generator), body))
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert generator.requests == []


async def test_the_operator_limits_the_text() -> None:
    app = app_of(FakeGenerator(), ApiConfig(max_speech_characters=5000))
    assert (await post_speech(app, speech("a" * 5000))).status_code == 200
    error = error_of(await post_speech(app, speech("a" * 5001)))
    assert (error["param"], error["code"]) == ("input", "string_above_max_length")
    assert "--max-speech-characters" in error["message"]
    async with http_client(app) as client:
        assert (await client.get("/v1/models")).json()["data"][0]["max_speech_characters"] == 5000


async def test_the_refusal_of_a_format_is_in_openais_words() -> None:
    error = error_of(await post_speech(app_of(FakeGenerator()), speech(response_format="m4a")))
    assert error["message"] == (
        "Unsupported value: 'response_format' does not support 'm4a'. "
        "Supported values are: 'mp3', 'opus', 'aac', 'flac', 'wav', 'pcm'."
    )


async def test_a_model_without_a_voice_refuses() -> None:
    error = error_of(await post_speech(app_of(FakeGenerator(TEXT_ONLY_MODEL)), speech()))
    assert (error["param"], error["code"]) == ("model", "unsupported_value")


@pytest.mark.parametrize("fields", [{}, {"stream_format": "sse"}, {"response_format": "flac"}])
@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (OverloadedError("full"), 503, "server_overloaded"),
        (
            InvalidRequestError("long", param="messages", code="context_length_exceeded"),
            400,
            "context_length_exceeded",
        ),
        (StageDeadError("talker", "gone"), 503, "engine_dead"),
        (RuntimeError("unforeseen"), 500, "internal_error"),
    ],
)
async def test_failure_before_the_first_sound_has_a_status_of_its_own(
    failure: Exception, status: int, code: str, fields: dict[str, Any]
) -> None:
    """Both where the request is not admitted and where it fails inside."""
    refusing, failing = FakeGenerator(), FakeGenerator(script=[TextDelta("a", (1,)), failure])
    refusing.submit_error = failure
    for generator in (refusing, failing):
        error = error_of(await post_speech(app_of(generator), speech(**fields)), status)
        assert error["code"] == code
        assert "unforeseen" not in error["message"]
        assert error["param"] == (
            "input" if status == 400 and generator is refusing else failure_param(failure)
        )
    assert failing.generations[0].num_closed == 1


def failure_param(failure: Exception) -> str | None:
    return failure.param if isinstance(failure, OmniError) else None


@pytest.mark.parametrize("audio_format", ["pcm", "mp3", "wav"])
async def test_failure_after_the_first_sound_cuts_the_connection(
    audio_format: str, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(FakeGenerator(script=[FIRST_PIECE, StageDeadError("talker", "gone")]))
    async with served(life), client_of(life.address) as client:
        body = speech(response_format=audio_format, stream=True)
        async with client.stream("POST", SPEECH_URL, json=body) as response:
            assert response.status_code == 200
            with pytest.raises(httpx2.RemoteProtocolError, match="incomplete"):
                await response.aread()
        assert (await client.get("/health")).status_code == 200
    assert "its connection is closed: engine_dead \"stage 'talker': gone\"" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("fields", [{"response_format": "wav"}, {"stream": False}])
async def test_failure_of_a_file_that_is_not_streamed_has_a_status_of_its_own(fields: dict[str, Any]) -> None:
    generator = FakeGenerator(script=[FIRST_PIECE, StageDeadError("talker", "gone")])
    error = error_of(await post_speech(app_of(generator), speech(**fields)), 503)
    assert error["code"] == "engine_dead"
    assert generator.generations[0].num_closed == 1


async def test_a_file_that_is_not_streamed_is_bounded() -> None:
    """Each second is less than what may be unsent, and all of them are more."""
    pieces = [AudioDelta(index, np.zeros(24_000, np.float32)) for index in range(5)]
    app = app_of(FakeGenerator(script=[*pieces, finished()]), ApiConfig(max_unsent_bytes=220_000))
    streamed = await post_speech(app, speech(response_format="pcm"))
    assert len(streamed.content) == 5 * 48_000
    error = error_of(await post_speech(app, speech(response_format="pcm", stream=False)))
    assert error["code"] == "client_too_slow"
    assert "'stream': true" in error["message"]
    async with http_client(app) as client:
        assert "omni_slow_client_disconnects_total 1.0" in (await client.get("/metrics")).text


async def test_failure_of_a_later_passage_leaves_the_response_without_an_end() -> None:
    generator = FakeGenerator()
    async with AsgiCall(app_of(generator), speech(LONG, response_format="pcm"), path=SPEECH_URL) as call:
        await call.message()
        generator.submit_error = OverloadedError("full")
        await call.task
        messages = []
        with suppress(TimeoutError):
            while True:
                messages.append(await asyncio.wait_for(call.message(), 0.05))
        assert messages
        assert all(message["more_body"] for message in messages)
    assert all(generation.num_closed == 1 for generation in generator.generations)


async def test_failure_after_the_first_event_is_the_last_event() -> None:
    generator = FakeGenerator(script=[FIRST_PIECE, StageDeadError("talker", "gone")])
    response = await spoken_by(generator, response_format="pcm", stream_format="sse")
    delta, error = (json.loads(payload) for payload in parse_frames(response.text))
    assert delta["type"] == "speech.audio.delta"
    assert error["error"]["code"] == "engine_dead"


@pytest.mark.parametrize("fields", [{"response_format": "pcm"}, {}, {"stream_format": "sse"}])
async def test_leaving_closes_the_generation(fields: dict[str, Any]) -> None:
    generator = FakeGenerator(script=[FIRST_PIECE, Hang()])
    async with AsgiCall(app_of(generator), speech(**fields), path=SPEECH_URL) as call:
        await call.message()
        await call.message()
        assert generator.generations[0].num_closed == 0
        call.leave()
        await asyncio.wait_for(generator.generations[0].closed.wait(), 10)


@pytest.mark.parametrize(
    ("fields", "script"),
    [
        ({}, [Hang()]),
        ({"stream_format": "sse"}, [Hang()]),
        ({"response_format": "flac"}, [FIRST_PIECE, Hang()]),
        ({"response_format": "wav"}, [FIRST_PIECE, Hang()]),
    ],
)
async def test_leaving_before_anything_is_sent_closes_the_generation(
    fields: dict[str, Any], script: list[ScriptEntry]
) -> None:
    generator = FakeGenerator(script=script)
    async with AsgiCall(app_of(generator), speech(**fields), path=SPEECH_URL) as call:
        await asyncio.wait_for(generator.submitted.wait(), 10)
        await asyncio.sleep(0.01)
        call.leave()
        await call.task
    assert generator.generations[0].num_closed == 1


async def test_nothing_is_read_before_the_model_is_loaded() -> None:
    error = error_of(await post_speech(app_of(None), speech()), 503)
    assert error["code"] == "model_not_ready"


# -- lists


async def test_voices_are_listed_with_openais_names_as_aliases() -> None:
    generator = FakeGenerator()
    async with http_client(app_of(generator)) as client:
        voices = (await client.get("/v1/audio/voices")).json()["voices"]
        assert voices[:2] == [{"id": "Chelsie", "name": "Chelsie"}, {"id": "Ethan", "name": "Ethan"}]
        assert [voice["id"] for voice in voices[2:]] == list(OPENAI_VOICES)
        for voice in voices[2:]:
            assert (await client.post(SPEECH_URL, json=speech(voice=voice["id"]))).status_code == 200
            assert generator.last_request.speech is not None
            assert generator.last_request.speech.voice == voice["alias_of"]


async def test_a_model_without_a_voice_lists_none() -> None:
    async with http_client(app_of(FakeGenerator(TEXT_ONLY_MODEL))) as client:
        assert (await client.get("/v1/audio/voices")).json() == {"voices": []}
