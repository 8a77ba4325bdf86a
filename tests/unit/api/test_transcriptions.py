"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx2
import numpy as np
import pytest
from fastapi import FastAPI

from omni_server.api.config import ApiConfig
from omni_server.errors import InvalidRequestError, OverloadedError, StageDeadError
from omni_server.media.limits import MediaLimits
from omni_server.types import ReadAloud, TextDelta, Transcribe
from tests.unit.api.asgi_call import AsgiCall
from tests.unit.api.clients import app_of, error_of, http_client, media, tone
from tests.unit.api.fake_generator import PROMPT, TEXT, WORDS, FakeGenerator, Hang, finished
from tests.unit.api.sse_validator import parse_frames
from tests.unit.media.containers import FRAGMENTED_MP4, LIVE_WEBM, record

TRANSCRIBE = "/v1/audio/transcriptions"
TRANSLATE = "/v1/audio/translations"
WAV = media("speech_hello.wav")
USAGE = {
    "type": "tokens",
    "input_tokens": PROMPT.total,
    "input_token_details": {"text_tokens": PROMPT.total - PROMPT.audio, "audio_tokens": PROMPT.audio},
    "output_tokens": len(WORDS),
    "total_tokens": PROMPT.total + len(WORDS),
}
ONE_SECOND = ApiConfig(max_upload_seconds=1.0, media_limits=MediaLimits(max_image_pixels=1))
"""Neither recordings nor images that are larger."""


async def post_form(
    app: FastAPI, fields: dict[str, Any], file: bytes | None = WAV, url: str = TRANSCRIBE
) -> Any:
    files = {"file": ("a.wav", file, "audio/wav")} if file is not None else {"unused": (None, b"")}
    async with http_client(app) as client:
        return await client.post(url, data={"model": "omni"} | fields, files=files)


async def heard_by(
    generator: FakeGenerator, url: str = TRANSCRIBE, file: bytes = WAV, **fields: Any
) -> httpx2.Response:
    response: httpx2.Response = await post_form(app_of(generator), fields, file, url)
    assert response.status_code == 200, response.text
    return response


def call_of(app: FastAPI, stream: str) -> AsgiCall:
    request = httpx2.Request(
        "POST", "http://server", data={"model": "omni", "stream": stream}, files={"file": ("a.wav", WAV)}
    )
    call = AsgiCall(app, path=TRANSCRIBE, raw_body=[request.read()])
    call.set_content_type(request.headers["content-type"])
    return call


def only_task(generator: FakeGenerator) -> Transcribe:
    (task,) = generator.tasks
    assert not isinstance(task, ReadAloud)
    return task


# -- answers


async def test_json_holds_the_text_and_the_tokens() -> None:
    response = await heard_by(FakeGenerator())
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {"text": TEXT, "usage": USAGE}


@pytest.mark.parametrize("url", [TRANSCRIBE, TRANSLATE])
async def test_text_is_plain(url: str) -> None:
    response = await heard_by(FakeGenerator(), url, response_format="text")
    assert response.headers["content-type"].partition(";")[0] == "text/plain"
    assert response.text == TEXT + "\n"


async def test_verbose_json_has_no_timestamps() -> None:
    seconds = 2.1
    expected = {"duration": seconds, "text": TEXT, "usage": {"type": "duration", "seconds": seconds}}
    wav = tone(num_samples=int(seconds * 24_000))
    for url, fields, said in [
        (TRANSCRIBE, {}, {"task": "transcribe", "language": "und"}),
        (TRANSCRIBE, {"language": "de"}, {"task": "transcribe", "language": "de"}),
        (TRANSLATE, {}, {"task": "translate", "language": "en"}),
    ]:
        response = await heard_by(FakeGenerator(), url, wav, response_format="verbose_json", **fields)
        assert response.json() == expected | said


async def test_deltas_add_up_to_the_text() -> None:
    response = await heard_by(FakeGenerator(), stream="true")
    assert response.headers["content-type"].partition(";")[0] == "text/event-stream"
    *deltas, done = [json.loads(payload) for payload in parse_frames(response.text)]
    assert {delta["type"] for delta in deltas} == {"transcript.text.delta"}
    assert "".join(delta["delta"] for delta in deltas) == TEXT
    assert len(deltas) == len([word for word in WORDS if word])
    assert done == {"type": "transcript.text.done", "text": TEXT, "usage": USAGE}


# -- what the model is asked


async def test_the_sound_is_what_is_transcribed() -> None:
    generator = FakeGenerator()
    await heard_by(generator, file=tone(num_samples=12_000))
    task = only_task(generator)
    assert (task.to_english, task.language, task.hint) == (False, None, None)
    assert (task.audio.samples.shape, task.audio.sample_rate_hz) == ((8_000,), 16_000)
    request = generator.last_request
    assert request.messages == generator.task_messages(task)
    assert request.speech is None
    assert request.sampling["thinker"].temperature == 0


async def test_a_translation_is_to_english() -> None:
    generator = FakeGenerator()
    await heard_by(generator, TRANSLATE, prompt="names", stream="false")
    task = only_task(generator)
    assert (task.to_english, task.hint) == (True, "names")


async def test_a_streamed_translation_is_refused() -> None:
    generator = FakeGenerator()
    async with http_client(app_of(generator)) as client:
        response = await client.post(
            TRANSLATE, data={"model": "omni", "stream": "true"}, files={"file": ("a.wav", WAV)}
        )
    error = error_of(response)
    assert (error["param"], error["code"]) == ("stream", "unsupported_value")
    assert generator.requests == []


async def test_empty_optional_fields_count_as_absent() -> None:
    names = (
        "language",
        "prompt",
        "response_format",
        "temperature",
        "stream",
        "include[]",
        "timestamp_granularities[]",
    )
    generator = FakeGenerator()
    response = await heard_by(generator, **dict.fromkeys(names, ""))
    assert response.json()["text"] == TEXT
    assert (only_task(generator).language, only_task(generator).hint) == (None, None)


@pytest.mark.parametrize(("given", "language"), [("de", "de"), ("EN", "en"), ("pt-BR", "pt"), ("", None)])
async def test_language_prompt_and_temperature_reach_the_model(given: str, language: str | None) -> None:
    generator = FakeGenerator()
    await heard_by(generator, language=given, prompt="Zyntrix", temperature="0.4")
    assert (only_task(generator).language, only_task(generator).hint) == (language, "Zyntrix")
    assert generator.last_request.sampling["thinker"].temperature == 0.4


async def test_fields_of_other_servers_are_ignored() -> None:
    await heard_by(FakeGenerator(), chunking_strategy="auto", hotwords="x", **{"languages[]": "en"})


async def test_a_long_recording_is_heard_in_pieces_whose_texts_are_joined() -> None:
    generator = FakeGenerator(script=[TextDelta(" Hello", (1,)), TextDelta(" there.", (2,)), finished()])
    response = await heard_by(generator, file=tone(num_samples=24_000 * 70))
    pieces = [task.audio.samples for task in generator.tasks if isinstance(task, Transcribe)]
    assert len(pieces) == len(generator.requests) == 3
    assert sum(map(len, pieces)) == 16_000 * 70
    assert max(map(len, pieces)) <= 16_000 * 30
    assert response.json()["text"] == "Hello there. Hello there. Hello there."
    assert response.json()["usage"]["input_tokens"] == 3 * PROMPT.total
    assert [generation.num_closed for generation in generator.generations] == [1] * 3


async def test_texts_without_spaces_are_joined_without_one() -> None:
    generator = FakeGenerator(script=[TextDelta("早上好", (1,)), finished()])
    response = await heard_by(generator, file=tone(num_samples=24_000 * 40))
    assert response.json()["text"] == "早上好早上好"


# -- mistakes and failures


@pytest.mark.parametrize(
    ("fields", "file", "param", "code"),
    [
        ({"model": ""}, WAV, "model", "empty_string"),
        ({}, None, "file", "missing_required_parameter"),
        ({"file": "path.wav"}, None, "file", "invalid_type"),
        ({"response_format": "srt"}, WAV, "response_format", "unsupported_value"),
        ({"response_format": "xml"}, WAV, "response_format", "unsupported_value"),
        ({"language": "klingon"}, WAV, "language", "invalid_value"),
        ({"temperature": "warm"}, WAV, "temperature", "invalid_value"),
        ({"temperature": "2"}, WAV, "temperature", "decimal_above_max_value"),
        ({"temperature": "nan"}, WAV, "temperature", "decimal_above_max_value"),
        ({"stream": "perhaps"}, WAV, "stream", "invalid_value"),
        ({"stream": "true", "response_format": "verbose_json"}, WAV, "stream", "invalid_value"),
        ({"timestamp_granularities[]": "word"}, WAV, "timestamp_granularities[]", "invalid_value"),
        (
            {"timestamp_granularities[]": ["word", "segment"], "response_format": "verbose_json"},
            WAV,
            "timestamp_granularities[]",
            "unsupported_value",
        ),
        ({"include[]": "logprobs"}, WAV, "include[]", "unsupported_value"),
        ({"prompt": "a" * 4097}, WAV, "prompt", "string_above_max_length"),
        ({"prompt": "a" * 70_000}, WAV, None, "invalid_form"),
    ],
)
async def test_bad_form_is_refused(
    fields: dict[str, Any], file: bytes | None, param: str | None, code: str
) -> None:
    generator = FakeGenerator()
    error = error_of(await post_form(app_of(generator), fields, file))
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert generator.requests == []


@pytest.mark.parametrize("file", [b"", b"\0" * 999, WAV[:20], tone(num_samples=100)])
async def test_a_file_that_cannot_be_read_is_refused(file: bytes) -> None:
    error = error_of(await post_form(app_of(FakeGenerator()), {}, file))
    assert (error["param"], error["code"]) == ("file", "invalid_audio")
    assert error["message"].startswith("Audio file might be corrupted or unsupported.")


RECORDERS = {
    "Chromium and Firefox": ("webm", "libopus", 48_000, LIVE_WEBM),
    "Safari": ("mp4", "aac", 44_100, FRAGMENTED_MP4),
    "a telephone": ("ipod", "aac", 44_100, None),
}


@pytest.mark.parametrize("url", [TRANSCRIBE, TRANSLATE])
@pytest.mark.parametrize("recorder", RECORDERS)
async def test_what_browsers_and_telephones_record_is_heard(url: str, recorder: str) -> None:
    """By its content: the name says WAV."""
    container, codec, rate, options = RECORDERS[recorder]
    sound = (0.5 * np.sin(np.arange(2 * rate) / 20))[None].astype(np.float32)
    generator = FakeGenerator()
    response = await heard_by(
        generator, url, record(container, codec, sound, rate, options=options), response_format="verbose_json"
    )
    assert response.json()["duration"] == pytest.approx(2, abs=0.05)
    audio = only_task(generator).audio
    assert (audio.sample_rate_hz, np.abs(audio.samples).max() > 0.4) == (16_000, True)


async def test_a_webm_that_is_too_long_is_refused() -> None:
    """It does not say how long it is."""
    app = app_of(FakeGenerator(), ApiConfig(max_upload_seconds=1.0))
    webm = record("webm", "libopus", np.zeros((1, 48_001 + 960), dtype=np.float32), 48_000, options=LIVE_WEBM)
    error = error_of(await post_form(app, {}, webm))
    assert error["message"] == "Audio file might be corrupted or unsupported. The audio is longer than 1 s."


async def test_a_recording_that_is_too_long_is_refused() -> None:
    app = app_of(FakeGenerator(), ApiConfig(max_upload_seconds=1.0))
    assert error_of(await post_form(app, {}, tone(num_samples=24_001)))["code"] == "invalid_audio"


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_recordings_are_kept_up_to_a_limit_of_memory(stream: str) -> None:
    """Of four times 1 s, at any rate of the files."""
    generator = FakeGenerator(script=[TextDelta("Hello", (1,)), Hang()])
    app = app_of(generator, replace(ONE_SECOND, media_queue_timeout_s=0.01))
    second, fields = tone(num_samples=24_000), {"stream": stream}
    running: list[asyncio.Task[Any]] = []
    for _ in range(4):
        generator.submitted.clear()
        running.append(asyncio.create_task(post_form(app, fields, second)))
        await asyncio.wait_for(generator.submitted.wait(), 10)
    generator.script = None
    assert error_of(await post_form(app, fields, tone(num_samples=5_000)), 503)["code"] == "server_overloaded"
    running[0].cancel()
    await asyncio.wait(running[:1])
    for _ in range(2):
        assert (await post_form(app, fields, second)).status_code == 200
    for task in running:
        task.cancel()
    await asyncio.wait(running)


async def test_a_recording_that_fails_leaves_its_room_to_others() -> None:
    app = app_of(FakeGenerator(), replace(ONE_SECOND, media_queue_timeout_s=0.5))
    bad = tone("FLAC", num_samples=24_000)
    for _ in range(9):
        assert error_of(await post_form(app, {}, bad[: len(bad) // 2]))["code"] == "invalid_audio"
    assert (await post_form(app, {}, tone(num_samples=24_000))).status_code == 200


async def test_a_file_of_26_mb_is_too_large() -> None:
    error = error_of(await post_form(app_of(FakeGenerator()), {}, bytes(26_000_000)), 413)
    assert (error["param"], error["code"]) == ("file", "file_too_large")


@pytest.mark.parametrize("num_bytes", [1001, 1_200_000])
async def test_a_file_above_the_limit_is_too_large_however_it_is_sent(num_bytes: int) -> None:
    """Slightly above, in a form whose size is allowed; and far above, in a body that does not
    declare its size."""
    app = app_of(FakeGenerator(), ApiConfig(max_upload_bytes=1000))
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'

    async def body() -> Any:
        yield head
        for _ in range(10):
            yield bytes(num_bytes // 10 + 1)
        yield b"\r\n--x--\r\n"

    async with http_client(app) as client:
        response = await client.post(
            TRANSCRIBE, content=body(), headers={"content-type": "multipart/form-data; boundary=x"}
        )
    assert error_of(response, 413)["code"] == "file_too_large"


@pytest.mark.parametrize(
    ("content_type", "body", "code"),
    [
        ("application/json", b"{}", "invalid_content_type"),
        ("application/x-www-form-urlencoded", b"model=omni", "invalid_content_type"),
        ("multipart/form-data", b"x", "invalid_form"),
        ("multipart/form-data; boundary=x", b"nothing of the kind", "invalid_form"),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Type: a\r\n\r\nb\r\n--x--\r\n", "invalid_form"),
        # Names of Python's codecs, of which some fail as nobody expects; found by changing forms at random.
        *(
            (f"multipart/form-data; boundary=x; charset={charset}", b"--x--\r\n", "invalid_form")
            for charset in ("undefined", "idna", "punycode", "a\0b", "utf-16", "base64", "no such")
        ),
        ("multipart/form-data; boundary=x; charset=UTF-8", b"--x--\r\n", "missing_required_parameter"),
        ("multipart/form-data; boundary=x; charset=ISO-8859-1", b"--x--\r\n", "missing_required_parameter"),
        ("multipart/form-data; boundary=x", b"--x--\r\n", "missing_required_parameter"),
        ("multipart/form-data; boundary=x", b"", "missing_required_parameter"),
    ],
)
async def test_what_is_no_form_is_refused(content_type: str, body: bytes, code: str) -> None:
    async with http_client(app_of(FakeGenerator())) as client:
        response = await client.post(TRANSCRIBE, content=body, headers={"content-type": content_type})
    assert error_of(response)["code"] == code


@pytest.mark.parametrize("fields", [{}, {"stream": "true"}])
@pytest.mark.parametrize(
    ("failure", "status", "param"),
    [
        (OverloadedError("full"), 503, None),
        (StageDeadError("thinker", "gone"), 503, None),
        (RuntimeError("unforeseen"), 500, None),
        (InvalidRequestError("long", param="messages", code="context_length_exceeded"), 400, "file"),
    ],
)
async def test_failure_before_the_first_words_has_a_status_of_its_own(
    failure: Exception, status: int, param: str | None, fields: dict[str, str]
) -> None:
    generator = FakeGenerator()
    generator.submit_error = failure
    error = error_of(await post_form(app_of(generator), fields), status)
    assert error["param"] == param
    assert "unforeseen" not in error["message"]


async def test_failure_of_a_stream_is_its_last_event() -> None:
    generator = FakeGenerator(script=[TextDelta("Hello", (1,)), StageDeadError("thinker", "gone")])
    response = await heard_by(generator, stream="true")
    delta, error = (json.loads(payload) for payload in parse_frames(response.text))
    assert delta["delta"] == "Hello"
    assert error["error"]["code"] == "engine_dead"
    assert generator.generations[0].num_closed == 1


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_leaving_closes_the_generation(stream: str) -> None:
    generator = FakeGenerator(script=[TextDelta("Hello", (1,)), Hang()])
    async with call_of(app_of(generator), stream) as call:
        await asyncio.wait_for(generator.submitted.wait(), 10)
        if stream == "true":
            await call.body_until(b"Hello")
        call.leave()
        await asyncio.wait_for(generator.generations[0].closed.wait(), 10)


async def test_nothing_is_heard_before_the_model_is_loaded() -> None:
    assert error_of(await post_form(app_of(None), {}), 503)["code"] == "model_not_ready"


async def test_silence_of_the_thinker_is_bridged_by_comments() -> None:
    generator = FakeGenerator(script=[TextDelta("Hello", (1,)), Hang()])
    async with call_of(app_of(generator, ApiConfig(sse_keep_alive_s=0.01)), "true") as call:
        assert (await call.body_until(b": keep-alive")).startswith(b"data: ")


async def test_a_form_of_very_many_fields_is_refused() -> None:
    response = await post_form(app_of(FakeGenerator()), {f"field{number}": "x" for number in range(101)})
    assert error_of(response)["code"] == "invalid_form"
