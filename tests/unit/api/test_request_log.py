"""One line per request, with what is known of it and nothing that is secret or said."""

import asyncio
import logging

import pytest
from fastapi import WebSocket

from omni_server.api.answer_stream import AnswerStream
from omni_server.api.app import create_app
from omni_server.api.config import ApiConfig
from omni_server.api.request_record import current_request
from omni_server.api.state import ServerState
from omni_server.errors import StageError
from omni_server.platform.log_format import Field, StructuredMessage
from omni_server.types import ChatMessage, Finished, OmniRequest, StageTimes, TextPart
from tests.unit.api.asgi_call import AsgiCall
from tests.unit.api.clients import URL, app_of, base64_of, chat, data_url, http_client, media, post, tone
from tests.unit.api.fake_generator import FakeGenerator, Hang, finished, speech_script, text_script
from tests.unit.api.test_auth import KEY, WebSocketCall, bearer

LOGGER = "omni_server.api.access_log"
SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "wav"}}


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[StructuredMessage]:
    found = [record.msg for record in caplog.records if record.name == LOGGER and record.levelno == level]
    assert all(isinstance(message, StructuredMessage) for message in found)
    return found  # type: ignore[return-value]


def only_line(caplog: pytest.LogCaptureFixture) -> tuple[str, dict[str, Field]]:
    (line,) = lines(caplog)
    return line.summary(), dict(line.fields())


@pytest.mark.parametrize("stream", [True, False])
async def test_answer_by_voice_has_its_numbers_on_one_line(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    times = {
        "thinker": StageTimes(0.0, 0.1, 0.2),
        "talker": StageTimes(0.15, 0.3, 0.4),
        "code2wav": StageTimes(0.35, 0.5, 0.6),
    }
    script = [*speech_script()[:-1], Finished("stop", finished(codec_tokens=5).usage, times)]
    app = app_of(FakeGenerator(script=script), ApiConfig(api_keys=(KEY,)))
    audio = {"type": "input_audio", "input_audio": {"data": base64_of(tone()), "format": "wav"}}
    body = chat(
        [audio],
        **(SPOKEN | ({"audio": {"voice": "Ethan", "format": "pcm16"}, "stream": True} if stream else {})),
    )
    await post(app, body, bearer(KEY) | {"X-Request-Id": "mine", "x-stainless-retry-count": "2"})
    summary, fields = only_line(caplog)
    assert summary == f"POST {URL} 200"
    timed = {name: fields.pop(name) for name in ("seconds", "first_text_s", "first_audio_s", "underrun_s")}
    assert all(isinstance(value, float) and value >= 0 for value in timed.values())
    assert str(fields.pop("answer_id")).startswith("chatcmpl-")
    assert fields.pop("audio_s") == pytest.approx(7001 / 24_000)
    assert fields.pop("audio_input_s") == pytest.approx(0.5)
    assert fields == {
        "request_id": "mine",
        "caller": "key-1",
        "client": "127.0.0.1",
        "status": 200,
        "retry": 2,
        "outcome": "ok",
        "reason": "stop",
        "prompt_tokens": 20,
        "prompt_audio": 5,
        "prompt_image": 2,
        "prompt_video": 1,
        "text_tokens": 6,
        "codec_tokens": 5,
        "thinker_s": (0.1, 0.2),
        "talker_s": (0.3, 0.4),
        "code2wav_s": (0.5, 0.6),
    }


async def test_refused_requests_tell_why(caplog: pytest.LogCaptureFixture) -> None:
    app = app_of(FakeGenerator())
    async with http_client(app) as client:
        await client.post(URL, json=chat(None))
        await client.get("/v1/models/none")
        await client.get("/v1/nope?api_key=hidden")
    told = [(line.summary(), line.fields()["error"]) for line in lines(caplog)]
    assert told == [
        (f"POST {URL} 400", "missing_required_parameter"),
        ("GET /v1/models/{model_id:path} 404", "model_not_found"),
        ("GET /v1/nope 404", "unknown_url"),
    ]
    assert "hidden" not in "".join(str(line) for line in lines(caplog))


@pytest.mark.parametrize("stream", [True, False])
async def test_failed_answer_has_its_error(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    app = app_of(FakeGenerator(script=[*text_script()[:2], StageError("talker", "failed")]))
    await post(app, chat(stream=stream))
    summary, fields = only_line(caplog)
    assert summary == f"POST {URL} {200 if stream else 500}"
    assert (fields["outcome"], fields["reason"]) == ("error", "internal_error")


@pytest.mark.parametrize(("stream", "status"), [(True, 200), (False, 499)])
async def test_client_that_left_is_told_as_aborted(
    stream: bool, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    generator = FakeGenerator(script=[*speech_script()[:4], Hang()])
    async with AsgiCall(app_of(generator), chat(stream=stream)):
        await asyncio.wait_for(generator.submitted.wait(), 10)
    _, fields = only_line(caplog)
    assert (fields["status"], fields["outcome"]) == (status, "aborted")


async def test_probes_are_quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with http_client(app_of(None)) as client:
        for path in ("/health", "/ready", "/live", "/metrics", "/version", "/load"):
            await client.get(path)
    assert lines(caplog) == []
    assert len(lines(caplog, logging.DEBUG)) == 6


async def test_lines_can_be_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    app = app_of(FakeGenerator(), ApiConfig(access_log=False))
    assert (await post(app, chat())).status_code == 200
    assert lines(caplog) == []


@pytest.mark.parametrize("path", ["/a%0AFAKE%20LINE", "/a%E2%80%A8b", "/" + "x" * 5000])
async def test_path_cannot_forge_a_line_or_flood_the_log(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async with http_client(app_of(FakeGenerator())) as client:
        await client.get(path)
    (line,) = lines(caplog)
    assert len(str(line).splitlines()) == 1
    assert len(str(line)) < 400


async def run_session(config: ApiConfig) -> list[int]:
    """Two answers in one session, the second one left; how many were kept in memory after each."""
    state = ServerState(FakeGenerator())
    app = create_app(state, config)
    kept: list[int] = []

    @app.websocket("/v1/scripted-session")
    async def realtime(websocket: WebSocket) -> None:
        await websocket.accept()
        for number in range(2):
            answer = AnswerStream(state.require_generator(), state, f"resp_{number}")
            await answer.submit(OmniRequest(f"resp_{number}", (ChatMessage("user", (TextPart("hi"),)),)))
            if number == 0:
                async for _ in answer.events():
                    pass
            await answer.aclose()
            record = current_request()
            assert record is not None
            kept.append(len(record.answers))
        await websocket.close()

    await WebSocketCall({"x-request-id": "session-1"}).send_to(app)
    return kept


async def test_each_answer_of_a_session_has_a_line_and_so_has_the_session(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert await run_session(ApiConfig()) == [0, 0]
    told = [
        (line.summary(), line.fields()["request_id"], line.fields().get("outcome")) for line in lines(caplog)
    ]
    assert told == [
        ("answer", "session-1", "ok"),
        ("answer", "session-1", "aborted"),
        ("WEBSOCKET /v1/scripted-session 101", "session-1", None),
    ]


async def test_nothing_that_was_said_or_sent_is_in_the_log_at_any_level(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    image = data_url(media("shapes.png"), "image/png")
    sound = base64_of(tone())
    content = [
        {"type": "text", "text": "my secret plan"},
        {"type": "image_url", "image_url": {"url": image}},
        {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
    ]
    bodies = [
        chat(content),
        chat(content, stream=True),
        chat(content, **SPOKEN),
        chat([*content, {"type": "image_url", "image_url": {"url": "data:image/png;base64,bm90aGluZw=="}}]),
        chat([{"type": "my secret plan"}]),
        chat(content, temperature="my secret plan"),
    ]
    failing = FakeGenerator(script=[*text_script()[:2], RuntimeError("odd")])
    for generator in (FakeGenerator(), failing):
        app = app_of(generator, ApiConfig(api_keys=(KEY,)))
        for body in bodies:
            await post(app, body, bearer(KEY))
        await post(app, bodies[0], bearer("sk-mistyped"))
    assert "key-1" in caplog.text
    for hidden in ("secret plan", image[40:80], sound[40:80], "bm90aGluZw", KEY, "sk-mistyped", "wörld"):
        assert hidden not in caplog.text
