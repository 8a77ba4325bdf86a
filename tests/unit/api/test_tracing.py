"""Traces: one span for each request, below it one for each stage, sent to a collector or
lost without harm."""

import asyncio
import logging
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi import FastAPI
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from websockets.asyncio.client import connect

from omni_server.api.access_log import RequestLine
from omni_server.api.app import create_app
from omni_server.api.config import ApiConfig
from omni_server.api.server import run_server
from omni_server.api.state import ServerState
from omni_server.api.tracing import open_tracer
from omni_server.errors import ConfigError, InvalidRequestError, StageDeadError, StageError
from omni_server.generation import Deliver
from omni_server.types import Finished, OmniRequest, StageTimes, WindowTimes
from tests.unit.api.clients import SPEECH, URL, chat, error_of, http_client, post
from tests.unit.api.collector import Collector, attributes
from tests.unit.api.fake_generator import (
    MODEL,
    TEXT,
    FakeGeneration,
    FakeGenerator,
    ScriptEntry,
    Wait,
    finished,
    speech_script,
    text_script,
)
from tests.unit.api.test_server import QUIET, Life, client_of, served

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
SAID = "Which zebra parade is that?"
TIMES = {
    "thinker": StageTimes(0.0, 0.1, 0.4),
    "talker": StageTimes(0.15, 0.2, 0.5),
    "code2wav": StageTimes(
        0.3, 0.35, 0.6, (WindowTimes(0.3, 0.3, 0.32), WindowTimes(0.4, 0.4, 0.5), WindowTimes(0.5, 0.5, 0.6))
    ),
}


def timed(script: Sequence[ScriptEntry], codec_tokens: int = 0) -> list[ScriptEntry]:
    return [*script[:-1], Finished("stop", finished(codec_tokens=codec_tokens).usage, TIMES)]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@asynccontextmanager
async def traced(collector: Collector, generator: FakeGenerator) -> AsyncIterator[FastAPI]:
    """The application; behind the block all spans have been sent."""
    tracer = open_tracer(collector.url)
    assert tracer is not None
    async with tracer:
        yield create_app(ServerState(generator, tracer), ApiConfig())


def seconds(begin: Span, end_ns: int) -> float:
    return (end_ns - begin.start_time_unix_nano) / 1e9


@pytest.mark.parametrize("stream", [False, True])
async def test_spoken_answer_has_a_span_for_each_stage_in_the_callers_trace(
    stream: bool, collector: Collector
) -> None:
    generator = FakeGenerator(script=timed(speech_script(), codec_tokens=5))
    body = chat(SAID, max_tokens=50, temperature=0.5, **SPEECH)
    if stream:
        body |= {"stream": True, "audio": {"voice": "Ethan", "format": "pcm16"}}
    async with traced(collector, generator) as app:
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "x-request-id": "mine"}
        assert (await post(app, body, headers)).status_code == 200
    (server,) = collector.named(f"POST {URL}")
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    assert server.parent_span_id.hex() == PARENT_ID
    assert server.kind == Span.SPAN_KIND_SERVER
    assert server.status.code == Status.STATUS_CODE_UNSET
    told = dict(attributes(server))
    assert isinstance(told.pop("omni.time_to_first_audio"), float)
    assert str(told.pop("gen_ai.response.id")).startswith("chatcmpl-")
    assert told == {
        "url.scheme": "http",
        "client.address": "127.0.0.1",
        "http.request.method": "POST",
        "http.route": URL,
        "http.response.status_code": 200,
        "omni.request_id": "mine",
        "omni.caller": "anonymous",
        "omni.outcome": "ok",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "omni-server",
        "gen_ai.request.model": "org/omni-tiny",
        "gen_ai.response.model": "org/omni-tiny",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.output.type": "speech",
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 6 + 5,
    }
    stages = [collector.named(name)[0] for name in ("thinker", "talker", "code2wav")]
    assert len(collector.spans) == 4
    assert {stage.parent_span_id for stage in stages} == {server.span_id}
    begins = [seconds(stages[0], stage.start_time_unix_nano) for stage in stages]
    assert begins == pytest.approx([0.0, 0.15, 0.3])
    lengths = [seconds(stage, stage.end_time_unix_nano) for stage in stages]
    assert lengths == pytest.approx([0.4, 0.35, 0.3])
    firsts = [seconds(stages[0], stage.events[0].time_unix_nano) for stage in stages]
    assert firsts == pytest.approx([0.1, 0.2, 0.35])
    assert 0 <= seconds(server, stages[0].start_time_unix_nano) < 60
    thinker, talker, code2wav = map(attributes, stages)
    assert thinker["gen_ai.usage.prompt_tokens"] == 20
    assert thinker["gen_ai.usage.completion_tokens"] == 6
    assert thinker["gen_ai.latency.time_to_first_token"] == pytest.approx(0.1)
    assert (thinker["gen_ai.request.max_tokens"], thinker["gen_ai.request.temperature"]) == (50, 0.5)
    assert talker["gen_ai.usage.completion_tokens"] == 5
    assert code2wav["omni.windows"] == 3
    assert code2wav["omni.audio_seconds"] == pytest.approx(7001 / 24_000)
    assert collector.resource["service.name"] == "omni-server"


async def test_spans_of_stages_begin_when_the_stages_received_the_request(collector: Collector) -> None:
    class SlowToReturn(FakeGenerator):
        async def submit(self, request: OmniRequest, deliver: Deliver) -> FakeGeneration:
            generation = await super().submit(request, deliver)
            self.received_ns = time.time_ns()
            await asyncio.sleep(0.1)
            returned.set()
            return generation

    returned = asyncio.Event()
    generator = SlowToReturn(script=[Wait(returned), *timed(speech_script(), codec_tokens=5)])
    async with traced(collector, generator) as app:
        assert (await post(app, chat(SAID, **SPEECH))).status_code == 200
    (thinker,) = collector.named("thinker")
    assert thinker.start_time_unix_nano < generator.received_ns + 0.05e9


async def test_the_replica_that_failed_is_told(collector: Collector) -> None:
    failing = FakeGenerator(script=[StageDeadError("talker/1", "its engine process was killed (SIGKILL)")])
    async with traced(collector, failing) as app:
        assert (await post(app, chat(SAID, **SPEECH))).status_code == 503
    (stage,) = [attributes(span) for span in collector.spans if not span.name.startswith("POST")]
    assert (stage["omni.stage"], stage["omni.replica"]) == ("talker", 1)


async def test_stages_are_named_as_the_config_names_them_and_have_their_replica(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "omni_server.api.access_log")
    windows = (WindowTimes(0.3, 0.3, 0.5),)
    times = {
        "brain": StageTimes(0.0, 0.1, 0.4),
        "audio": StageTimes(0.15, 0.2, 0.5, replica=1),
        "tones": StageTimes(0.3, 0.4, 0.4, windows),
        "mixer": StageTimes(0.4, 0.5, 0.5),
    }
    script = [*speech_script()[:-1], Finished("stop", finished(codec_tokens=5).usage, times)]
    model = replace(MODEL, text_stage="brain", speech_stage="audio")
    async with traced(collector, FakeGenerator(model, script)) as app:
        assert (await post(app, chat(SAID, max_tokens=50, **SPEECH))).status_code == 200
    stages = {span.name: attributes(span) for span in collector.spans if not span.name.startswith("POST")}
    assert list(stages) == list(times)
    assert [stage["omni.stage"] for stage in stages.values()] == list(times)
    assert stages["brain"]["gen_ai.usage.completion_tokens"] == 6
    assert stages["brain"]["gen_ai.request.max_tokens"] == 50
    assert stages["audio"]["gen_ai.usage.completion_tokens"] == 5
    assert stages["tones"]["omni.windows"] == 1
    assert [stage.get("omni.replica") for stage in stages.values()] == [None, 1, None, None]
    (fields,) = [record.msg.fields() for record in caplog.records if isinstance(record.msg, RequestLine)]
    assert fields["brain_s"] == (0.1, 0.4)
    assert fields["audio_s"] == pytest.approx(7001 / 24_000)
    assert fields["stage_audio_s"] == (0.2, 0.5)
    assert fields["tones_s"] == (0.4, 0.4)
    assert fields["mixer_s"] == (0.5, 0.5)
    assert {name: value for name, value in fields.items() if "replica" in name} == {"audio_replica": 1}


async def test_nothing_that_was_said_is_in_a_trace(collector: Collector) -> None:
    async with traced(collector, FakeGenerator()) as app, http_client(app) as client:
        await client.post(URL, json=chat(SAID, stop=["zebra"], metadata={"zebra": "parade"}))
        await client.post(URL, json=chat(SAID, voice="zebra", response_format={"type": "zebra"}))
        await client.get("/v1/zebra?key=zebra")
        await client.get("/v1/models/zebra")
    assert len(collector.spans) == 4  # the script has no times of stages
    assert b"zebra" not in collector.raw
    assert TEXT.split()[0].encode() not in collector.raw


async def test_each_choice_has_its_stages_and_the_prompt_counts_once(collector: Collector) -> None:
    async with traced(collector, FakeGenerator(script=timed(text_script()))) as app:
        await post(app, chat(n=3))
    (server,) = collector.named(f"POST {URL}")
    thinkers = collector.named("thinker")
    assert len(thinkers) == 3
    assert len({attributes(thinker)["gen_ai.request.id"] for thinker in thinkers}) == 3
    told = attributes(server)
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (20, 18)


@pytest.mark.parametrize("stream", [False, True])
async def test_failure_of_a_stage_is_one_of_its_span_and_of_the_requests(
    stream: bool, collector: Collector
) -> None:
    script = [*speech_script()[:3], StageError("talker", "zebra")]
    body = chat(**SPEECH)
    if stream:
        body |= {"stream": True, "audio": {"voice": "Ethan", "format": "pcm16"}}
    async with traced(collector, FakeGenerator(script=script)) as app:
        response = await post(app, body)
    assert response.status_code == (200 if stream else 500)
    server, talker = collector.named(f"POST {URL}")[0], collector.named("talker")[0]
    assert (server.status.code, talker.status.code) == (Status.STATUS_CODE_ERROR, Status.STATUS_CODE_ERROR)
    assert attributes(server)["error.type"] == attributes(talker)["error.type"] == "internal_error"
    assert talker.parent_span_id == server.span_id
    assert b"zebra" not in collector.raw


async def test_refused_request_is_no_failure_of_the_server(collector: Collector) -> None:
    generator = FakeGenerator()
    generator.submit_error = InvalidRequestError("too long", code="context_length_exceeded")
    async with traced(collector, generator) as app:
        error_of(await post(app, chat()), 400)
    (server,) = collector.spans
    assert server.status.code == Status.STATUS_CODE_UNSET
    told = attributes(server)
    assert (told["http.response.status_code"], told["omni.error_code"]) == (400, "context_length_exceeded")


async def test_only_what_is_under_v1_is_traced(collector: Collector) -> None:
    async with traced(collector, FakeGenerator()) as app, http_client(app) as client:
        for path in ("/health", "/ready", "/metrics", "/", "/v1/models"):
            assert (await client.get(path)).status_code == 200
    assert [span.name for span in collector.spans] == ["GET /v1/models"]


@pytest.mark.parametrize(
    "header", ["", "00-zz-b7ad6b7169203331-01", f"00-{'0' * 32}-{PARENT_ID}-01", "x" * 10_000]
)
async def test_malformed_trace_header_begins_a_trace_of_its_own(header: str, collector: Collector) -> None:
    async with traced(collector, FakeGenerator()) as app:
        assert (await post(app, chat(), {"traceparent": header})).status_code == 200
    (server,) = collector.spans
    assert server.parent_span_id == b""
    assert len(server.trace_id) == 16


@pytest.mark.parametrize(
    "state", ["what the user said", "a" + 20_000 * " " + "b", ",".join("k=v" for _ in range(100))]
)
async def test_tracestate_is_neither_read_nor_logged(
    state: str, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    async with traced(collector, FakeGenerator()) as app:
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": state}
        assert (await post(app, chat(), headers)).status_code == 200
    (server,) = collector.spans
    assert server.parent_span_id.hex() == PARENT_ID
    assert server.trace_state == ""
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


async def test_trace_that_the_caller_does_not_record_is_not_recorded(collector: Collector) -> None:
    async with traced(collector, FakeGenerator(script=timed(text_script()))) as app:
        await post(app, chat(), {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"})
    assert collector.spans == []


async def test_realtime_session_is_a_span_above_the_stages_of_its_answers(collector: Collector) -> None:
    life = Life(FakeGenerator(script=timed(speech_script(), codec_tokens=5)))
    async with (
        served(life, replace(QUIET, otlp_traces_endpoint=collector.url)),
        connect(f"ws{life.address.removeprefix('http')}/v1/realtime") as session_socket,
    ):
        for _ in range(2):
            await session_socket.send('{"type": "response.create"}')
            while "response.done" not in str(await asyncio.wait_for(session_socket.recv(), 20)):
                pass
    (session,) = collector.named("WEBSOCKET /v1/realtime")
    assert attributes(session)["gen_ai.usage.output_tokens"] == 2 * (6 + 5)
    for name in ("thinker", "talker", "code2wav"):
        assert [span.parent_span_id for span in collector.named(name)] == [session.span_id] * 2


async def test_server_sends_the_last_spans_before_it_ends(collector: Collector) -> None:
    life = Life(FakeGenerator(script=timed(text_script())))
    async with (
        served(life, replace(QUIET, otlp_traces_endpoint=collector.url)) as running,
        client_of(life.address) as client,
    ):
        assert (await client.post(URL, json=chat())).status_code == 200
    assert running.result() == 0
    assert {span.name for span in collector.spans} == {f"POST {URL}", "thinker", "talker", "code2wav"}


async def test_collector_that_hangs_harms_nothing_and_the_server_ends(
    collector: Collector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for patience in ("_EXPORT_TIMEOUT_S", "_CLOSE_TIMEOUT_S"):
        monkeypatch.setattr(f"omni_server.api.otel.{patience}", 1.0)
    collector.answers.clear()
    life = Life(FakeGenerator(script=timed(text_script())))
    async with (
        served(life, replace(QUIET, otlp_traces_endpoint=collector.url)) as running,
        client_of(life.address) as client,
    ):
        assert (await client.post(URL, json=chat())).status_code == 200
        assert await asyncio.to_thread(collector.asked.wait, 30)
        for _ in range(20):  # while the thread that sends hangs
            assert (await client.post(URL, json=chat())).status_code == 200
    assert running.result() == 0
    assert collector.spans == []
    for thread in threading.enumerate():  # it would log in another test
        if thread.name == "traces":
            await asyncio.to_thread(thread.join, 30)
    # Whether the sender's time or the server's patience is over first is chance.
    assert [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_spans_beyond_the_queue_are_dropped(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omni_server.api.otel._MAX_WAITING_SPANS", 600)
    collector.answers.clear()
    async with traced(collector, FakeGenerator()) as app, http_client(app) as client:
        for _ in range(600):
            await client.get("/v1/models")
        assert await asyncio.to_thread(collector.asked.wait, 30)  # with the first 512
        for _ in range(700):
            assert (await client.get("/v1/models")).status_code == 200
        collector.answers.set()
    assert 600 <= len(collector.spans) < 1300


@pytest.mark.parametrize(
    "url", ["", "localhost:4317", "grpc://localhost:4317", "http://", "http://[::1", "/v1/traces"]
)
async def test_endpoint_that_is_no_url_ends_the_start(url: str) -> None:
    life = Life()
    with pytest.raises(ConfigError, match="is not an http"):
        await run_server(life.start, life.stop, replace(QUIET, otlp_traces_endpoint=url), life.on_ready)
    assert life.num_starts == 0


async def test_missing_package_ends_the_start_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "omni_server.api.otel", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    life = Life()
    with pytest.raises(ConfigError, match=r"is missing: pip install 'omni-server\[otel\]'"):
        await run_server(
            life.start, life.stop, replace(QUIET, otlp_traces_endpoint="http://x:4318"), life.on_ready
        )
    assert life.num_starts == 0


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    code = (
        "import sys, omni_server.api.server, omni_server.api.tracing as tracing; tracing.open_tracer(None); "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    root = Path(__file__).parents[3]
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root
    )
    assert (result.stdout.strip(), result.stderr) == ("[]", "")
