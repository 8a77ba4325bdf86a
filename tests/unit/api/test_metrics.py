"""`/metrics`: parsed as Prometheus does, right after requests of every outcome, and gauges back at 0."""

import asyncio
from collections.abc import Mapping

import numpy as np
import pytest
from fastapi import WebSocket
from prometheus_client.parser import text_string_to_metric_families

from omni_server.api.app import create_app
from omni_server.api.config import ApiConfig
from omni_server.api.request_record import AnswerRecord
from omni_server.api.state import ServerState
from omni_server.errors import OverloadedError, StageError
from omni_server.types import (
    SAMPLE_RATE_HZ,
    AudioDelta,
    ChatMessage,
    OmniRequest,
    SpeechOutput,
    TextDelta,
    TextPart,
)
from tests.unit.api.asgi_call import AsgiCall
from tests.unit.api.clients import URL, app_of, base64_of, chat, http_client, post, tone
from tests.unit.api.fake_generator import SAMPLES, FakeGenerator, Hang, finished, speech_script, text_script
from tests.unit.api.test_auth import KEY, WebSocketCall

GAUGES = ("omni_requests_running", "omni_requests_in_flight", "omni_websocket_sessions")

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Values:
    """Every sample by name and labels."""
    names: list[str] = []
    values: Values = {}
    for family in text_string_to_metric_families(text):
        names.append(family.name)
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in values, key
            values[key] = sample.value
    assert len(names) == len(set(names))
    return values


async def scraped(app: object) -> Values:
    async with http_client(app) as client:  # type: ignore[arg-type]
        response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return parsed(response.text)


def value(values: Mapping[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return values.get((name, frozenset(labels.items())), 0.0)


def ended(values: Values, outcome: str, reason: str) -> float:
    return value(values, "omni_requests_total", outcome=outcome, reason=reason)


async def test_metrics_are_there_before_the_model() -> None:
    values = await scraped(app_of(None))
    assert [value(values, gauge) for gauge in GAUGES] == [0, 0, 0]
    assert value(values, "omni_requests_in_flight_limit") == ApiConfig().max_queue


async def test_what_the_generator_measures_is_appended() -> None:
    generator = FakeGenerator()
    generator.metrics = b'vllm:num_requests_running{stage="thinker"} 3.0\n'
    values = await scraped(app_of(generator))
    assert value(values, "vllm:num_requests_running", stage="thinker") == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_answer_by_voice_is_counted(stream: bool) -> None:
    app = app_of(FakeGenerator())
    audio = {
        "type": "input_audio",
        "input_audio": {"data": base64_of(tone(num_samples=12_000)), "format": "wav"},
    }
    fields = {
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "pcm16"},
        "stream": stream,
    }
    assert (await post(app, chat([audio], **fields))).status_code == 200
    values = await scraped(app)
    assert ended(values, "ok", "stop") == 1
    assert value(values, "omni_audio_output_seconds_total") == pytest.approx(len(SAMPLES) / SAMPLE_RATE_HZ)
    assert value(values, "omni_audio_input_seconds_total") == pytest.approx(0.5)
    for name in ("time_to_first_token_seconds", "time_to_first_audio_seconds", "audio_real_time_factor"):
        assert value(values, f"omni_{name}_count") == 1
    assert value(values, "omni_audio_underrun_seconds_count") == 1
    assert value(values, "omni_e2e_request_latency_seconds_count", kind="speech") == 1
    assert value(values, "http_requests_total", handler=URL, method="POST", status="200") == 1
    assert [value(values, gauge) for gauge in GAUGES] == [0, 0, 0]


async def test_sound_that_is_sent_is_counted_once_however_many_choices_it_has() -> None:
    app = app_of(FakeGenerator())
    audio = {
        "type": "input_audio",
        "input_audio": {"data": base64_of(tone(num_samples=12_000)), "format": "wav"},
    }
    assert (await post(app, chat([audio], n=3))).status_code == 200
    values = await scraped(app)
    assert ended(values, "ok", "stop") == 3
    assert value(values, "omni_audio_input_seconds_total") == pytest.approx(0.5)


async def test_answer_in_text_has_no_sound() -> None:
    app = app_of(FakeGenerator(script=text_script("length")))
    await post(app, chat())
    values = await scraped(app)
    assert ended(values, "ok", "length") == 1
    assert value(values, "omni_e2e_request_latency_seconds_count", kind="text") == 1
    assert value(values, "omni_time_to_first_audio_seconds_count") == 0
    assert value(values, "omni_audio_real_time_factor_count") == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("failure", "code"),
    [(StageError("talker", "failed"), "internal_error"), (RuntimeError("odd"), "internal_error")],
)
async def test_failure_is_counted_by_its_code(stream: bool, failure: Exception, code: str) -> None:
    app = app_of(FakeGenerator(script=[*speech_script()[:3], failure]))
    await post(app, chat(stream=stream))
    values = await scraped(app)
    assert ended(values, "error", code) == 1
    assert value(values, "omni_e2e_request_latency_seconds_count", kind="text") == 0
    assert [value(values, gauge) for gauge in GAUGES] == [0, 0, 0]


async def test_refusal_at_submission_is_counted() -> None:
    generator = FakeGenerator()
    generator.submit_error = OverloadedError("full")
    app = app_of(generator)
    await post(app, chat())
    assert ended(await scraped(app), "error", "server_overloaded") == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("where", ["submission", "generation"])
async def test_client_that_leaves_is_counted_as_aborted(stream: bool, where: str) -> None:
    generator = FakeGenerator(script=[TextDelta("a", (1,)), Hang()])
    generator.submit_hangs = where == "submission"
    app = app_of(generator)
    async with AsgiCall(app, chat(stream=stream)):
        await asyncio.wait_for(generator.submitted.wait(), 10)
        values = await scraped(app)
        assert value(values, "omni_requests_running") == value(values, "omni_requests_in_flight") == 1
    values = await scraped(app)
    assert ended(values, "aborted", "") == 1
    assert [value(values, gauge) for gauge in GAUGES] == [0, 0, 0]


async def test_generation_that_the_server_ends_counts_as_its_error() -> None:
    generator = FakeGenerator(script=[Hang()])
    state = ServerState(generator)
    app = create_app(state, ApiConfig())
    async with http_client(app) as client:
        sending = asyncio.create_task(client.post(URL, json=chat()))
        await asyncio.wait_for(generator.submitted.wait(), 10)
        state.abort(OverloadedError("bye", code="server_shutting_down"))
        assert (await sending).status_code == 503
    assert ended(await scraped(app), "error", "server_shutting_down") == 1


async def test_http_requests_are_counted_by_route_and_status() -> None:
    app = app_of(FakeGenerator(), ApiConfig(api_keys=(KEY,)))
    async with http_client(app, headers={"Authorization": f"Bearer {KEY}"}) as client:
        await client.get("/v1/models/omni")
        await client.get("/v1/models/org/omni-tiny")
        await client.get("/v1/models/none")
        await client.get("/nope/1")
        await client.get("/nope/2")
        await client.request("BREW", "/health")
        await client.post(URL, json=chat(None))
        await client.post(URL, json=chat(), headers={"x-stainless-retry-count": "1"})
        await client.get("/v1/models", headers={"Authorization": "Bearer wrong"})
    values = await scraped(app)

    def count(handler: str, method: str, status: str) -> float:
        return value(values, "http_requests_total", handler=handler, method=method, status=status)

    assert count("/v1/models/{model_id:path}", "GET", "200") == 2
    assert count("/v1/models/{model_id:path}", "GET", "404") == 1
    assert count("none", "GET", "404") == 2  # one label, whatever clients make up
    assert count("/health", "other", "405") == 1
    assert count(URL, "POST", "400") == 1
    assert count(URL, "POST", "200") == 1
    assert count("none", "GET", "401") == 1
    assert value(values, "omni_client_retries_total") == 1


async def test_refusals_by_a_limit_are_counted() -> None:
    generator = FakeGenerator(script=[Hang()])
    app = app_of(generator, ApiConfig(max_queue=1))
    async with AsgiCall(app, chat()):
        await asyncio.wait_for(generator.submitted.wait(), 10)
        assert (await post(app, chat())).status_code == 503
    values = await scraped(app)
    assert value(values, "omni_admission_rejections_total", reason="max_queue") == 1
    assert value(values, "omni_admission_rejections_total", reason="max_concurrency_per_key") == 0


async def test_session_is_counted_while_it_is_open() -> None:
    state = ServerState(FakeGenerator())
    app = create_app(state, ApiConfig())
    seen: list[float] = []

    @app.websocket("/v1/scripted-session")
    async def realtime(websocket: WebSocket) -> None:
        await websocket.accept()
        seen.append(value(parsed(state.metrics.text().decode()), "omni_websocket_sessions"))
        await websocket.close()

    await WebSocketCall().send_to(app)
    assert seen == [1]
    values = await scraped(app)
    assert value(values, "omni_websocket_sessions") == 0
    assert (
        value(values, "http_requests_total", handler="/v1/scripted-session", method="WEBSOCKET", status="101")
        == 1
    )


# -- one answer


def answer(clock: list[float], *, speech: bool = True) -> AnswerRecord:
    request = OmniRequest("r", (ChatMessage("user", (TextPart("hi"),)),), SpeechOutput() if speech else None)
    return AnswerRecord(request, clock=lambda: clock[0])


def sound(seconds: float) -> AudioDelta:
    return AudioDelta(0, np.zeros(round(seconds * SAMPLE_RATE_HZ), dtype=np.float32))


def test_underrun_is_the_silence_of_a_player_without_a_reserve() -> None:
    clock = [10.0]
    record = answer(clock)
    for at, seconds in [(10.5, 1.0), (11.0, 1.0), (13.0, 0.5), (13.4, 0.1), (14.0, 1.0)]:
        clock[0] = at
        record.take(sound(seconds))
    # Played from 10.5 to 12.5, silent to 13.0, played to 13.6, silent to 14.0.
    assert record.underrun_s == pytest.approx(0.5 + 0.4)
    assert record.first_audio_s == pytest.approx(0.5)
    assert record.last_audio_s == pytest.approx(4.0)
    assert record.audio_s == pytest.approx(3.6)


def test_first_text_is_the_first_token_and_the_outcome_is_the_first_end() -> None:
    clock = [0.0]
    record = answer(clock, speech=False)
    clock[0] = 0.25
    record.take(TextDelta("", ()))
    before = record.first_text_s
    clock[0] = 0.5
    record.take(TextDelta("", (7,)))
    assert (before, record.first_text_s) == (None, 0.5)
    clock[0] = 2.0
    record.take(finished("length"))
    clock[0] = 3.0
    record.closed()
    record.take(RuntimeError("late"))
    assert (record.outcome, record.reason, record.duration_s) == ("ok", "length", 2.0)
