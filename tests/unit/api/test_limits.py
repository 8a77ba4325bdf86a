"""What is refused before it is read: too many requests, too large or too slow a body."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from fastapi import Request

from omni_server.api.app import create_app
from omni_server.api.config import ApiConfig
from omni_server.api.limits import MAX_RETRY_AFTER_S, Admission
from omni_server.api.server_metrics import ServerMetrics
from omni_server.api.state import ServerState
from tests.unit.api.asgi_call import AsgiCall
from tests.unit.api.clients import URL, Endpoint, app_of, chat, each_endpoint, error_of, http_client, post
from tests.unit.api.fake_generator import FakeGenerator, Wait, text_script
from tests.unit.api.test_auth import KEY, OTHER_KEY, WebSocketCall, bearer

FULL = ApiConfig(max_queue=2)


class Held:
    """A generator whose answers wait until `release`."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.generator = FakeGenerator(script=[Wait(self.gate), *text_script()])

    async def until_running(self, count: int) -> None:
        while len(self.generator.generations) < count:  # noqa: ASYNC110 - it tells of the first only
            await asyncio.sleep(0)


@each_endpoint
async def test_full_server_refuses_with_503_and_a_time_to_come_back(endpoint: Endpoint) -> None:
    held = Held()
    async with http_client(app_of(held.generator, FULL)) as client:
        running = [
            asyncio.create_task(client.post(endpoint.url, json=endpoint.body(stream=index == 0)))
            for index in range(2)
        ]
        await held.until_running(2)
        refusal = await client.post(endpoint.url, json=endpoint.body())
        assert error_of(refusal, 503)["code"] == "server_overloaded"
        assert 1 <= int(refusal.headers["retry-after"]) <= 120
        assert "x-should-retry" not in refusal.headers
        # Probes go on; only /ready says that other servers should be asked.
        assert (await client.get("/health")).status_code == 200
        assert error_of(await client.get("/ready"), 503)["code"] == "server_overloaded"
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/load")).json() == {"server_load": 2}
        held.gate.set()
        assert [(await task).status_code for task in running] == [200, 200]
        assert (await client.get("/ready")).status_code == 200
        assert (await client.get("/load")).json() == {"server_load": 0}
        assert (await client.post(endpoint.url, json=endpoint.body())).status_code == 200
    assert len(held.generator.requests) == 3


async def test_each_choice_takes_a_place() -> None:
    held = Held()
    async with http_client(app_of(held.generator, ApiConfig(max_queue=3))) as client:
        running = [asyncio.create_task(client.post(URL, json=chat(n=2, stream=True)))]
        await held.until_running(2)
        assert (await client.get("/load")).json() == {"server_load": 2}
        refusal = await client.post(URL, json=chat(n=2))
        assert error_of(refusal, 503)["code"] == "server_overloaded"
        assert "retry-after" in refusal.headers
        assert (await client.get("/load")).json() == {"server_load": 2}
        held.gate.set()
        assert [(await task).status_code for task in running] == [200]
        assert (await client.get("/load")).json() == {"server_load": 0}
        assert (await client.post(URL, json=chat(n=3))).status_code == 200
        error = error_of(await client.post(URL, json=chat(n=4)))
        assert (error["param"], error["code"]) == ("n", "integer_above_max_value")
        assert (await client.get("/load")).json() == {"server_load": 0}


async def test_choices_count_for_the_limit_of_their_key() -> None:
    config = ApiConfig(api_keys=(KEY,), max_concurrency_per_key=2)
    async with http_client(app_of(FakeGenerator(), config), headers=bearer(KEY)) as client:
        assert (await client.post(URL, json=chat(n=2))).status_code == 200
        error = error_of(await client.post(URL, json=chat(n=3)))
        assert (error["param"], error["code"]) == ("n", "integer_above_max_value")


async def test_refusal_comes_before_the_body() -> None:
    held = Held()
    app = app_of(held.generator, ApiConfig(max_queue=1))
    async with AsgiCall(app, chat()), AsgiCall(app, raw_body=[b"{" * 100], body_ends=False) as second:
        await held.until_running(1)
        start = await second.message()
        assert start["status"] == 503
        assert second.num_chunks_read == 0
        held.gate.set()


@pytest.mark.parametrize("end", ["client leaves", "failure", "bad request"])
async def test_place_is_given_back_however_a_request_ends(end: str) -> None:
    generator = FakeGenerator()
    app = app_of(generator, ApiConfig(max_queue=1))
    if end == "failure":
        generator.submit_error = RuntimeError("odd")
        assert (await post(app, chat())).status_code == 500
    elif end == "bad request":
        assert (await post(app, chat(None))).status_code == 400
    else:
        generator.submit_hangs = True
        async with AsgiCall(app, chat()):
            await asyncio.wait_for(generator.submitted.wait(), 10)
    async with http_client(app) as client:
        assert (await client.get("/load")).json() == {"server_load": 0}


@each_endpoint
async def test_one_key_cannot_take_the_places_of_others(endpoint: Endpoint) -> None:
    held = Held()
    config = ApiConfig(api_keys=(KEY, OTHER_KEY), max_queue=10, max_concurrency_per_key=1)
    async with http_client(app_of(held.generator, config)) as client:
        running = asyncio.create_task(client.post(endpoint.url, json=endpoint.body(), headers=bearer(KEY)))
        await held.until_running(1)
        refusal = await client.post(endpoint.url, json=endpoint.body(), headers=bearer(KEY))
        error = error_of(refusal, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert 1 <= int(refusal.headers["retry-after"]) <= 120
        other = asyncio.create_task(
            client.post(endpoint.url, json=endpoint.body(), headers=bearer(OTHER_KEY))
        )
        await held.until_running(2)
        held.gate.set()
        assert [(await task).status_code for task in (running, other)] == [200, 200]
        assert (await client.post(endpoint.url, json=endpoint.body(), headers=bearer(KEY))).status_code == 200


async def test_session_holds_a_place_and_is_refused_at_the_upgrade() -> None:
    config = ApiConfig(api_keys=(KEY,), max_concurrency_per_key=0, max_queue=0)
    assert (await WebSocketCall(bearer(KEY)).run(config)).status == 101  # 0 is no limit

    held = Held()
    app = create_app(ServerState(held.generator), ApiConfig(max_queue=1))
    async with AsgiCall(app, chat()):
        await held.until_running(1)
        call = WebSocketCall()
        await call.send_to(app)
        assert call.status == 503
        assert call.error()["code"] == "server_overloaded"
        held.gate.set()


def admission(clock: list[float], **limits: int) -> Admission:
    return Admission(
        ServerMetrics("1"), **({"max_queue": 0, "max_per_caller": 0} | limits), clock=lambda: clock[0]
    )


def test_time_to_come_back_follows_how_long_requests_take() -> None:
    clock = [0.0]
    places = admission(clock)
    for _ in range(100):
        leave = places.enter("anonymous")
        clock[0] += 20.0
        leave()
    leaves = [places.enter("anonymous") for _ in range(7)]
    assert places.retry_after_s() == 3  # 20 s over 7 places
    for leave in leaves[:5]:
        leave()
    assert places.retry_after_s() == MAX_RETRY_AFTER_S
    assert admission([0.0]).retry_after_s() == 1


# -- bodies


async def chunks(data: bytes, size: int) -> AsyncIterator[bytes]:
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("path", [URL, "/v1/echo"])
async def test_body_above_the_limit_is_413_whichever_way_it_is_sent(declared: bool, path: str) -> None:
    app = app_of(FakeGenerator(), ApiConfig(max_body_bytes=1000))

    @app.post("/v1/echo")
    async def echo(request: Request) -> int:  # reads by itself, without `read_json`
        return len(await request.body())

    data = json.dumps(chat("x" * 2000)).encode()
    content = data if declared else chunks(data, 500)
    async with http_client(app) as client:
        response = await client.post(path, content=content, headers={"Content-Type": "application/json"})
        assert error_of(response, 413)["code"] == "request_too_large"
        assert (await client.post(URL, json=chat())).status_code == 200


@pytest.mark.parametrize("sent", [[b'{"model": '], []])
async def test_upload_that_stalls_is_ended_with_408(sent: list[bytes]) -> None:
    app = app_of(FakeGenerator(), ApiConfig(body_timeout_s=0.05, max_queue=1))
    async with AsgiCall(app, raw_body=sent, body_ends=False) as call:
        start = await call.message()
        assert start["status"] == 408
        assert json.loads((await call.message())["body"])["error"]["code"] == "upload_timeout"
    assert (await post(app, chat())).status_code == 200


async def test_probes_are_answered_while_uploads_stall() -> None:
    app = app_of(FakeGenerator())
    async with AsyncExitStack() as stack, http_client(app) as client:
        calls = [
            await stack.enter_async_context(AsgiCall(app, raw_body=[b"{"], body_ends=False))
            for _ in range(50)
        ]
        while any(call.num_chunks_read < 1 for call in calls):  # noqa: ASYNC110 - they are told nothing to wait for
            await asyncio.sleep(0)
        for path in ("/health", "/ready", "/live", "/metrics"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/load")).json() == {"server_load": 50}


async def test_time_of_the_upload_does_not_limit_the_answer() -> None:
    held = Held()
    app = app_of(held.generator, ApiConfig(body_timeout_s=0.05))
    async with http_client(app) as client:
        sending = asyncio.create_task(client.post(URL, json=chat(stream=True)))
        await held.until_running(1)
        await asyncio.sleep(0.1)
        held.gate.set()
        assert (await sending).text.endswith("data: [DONE]\n\n")


async def test_bodies_together_are_bounded_by_what_has_arrived() -> None:
    held = Held()
    config = ApiConfig(max_body_bytes=10_000, max_total_body_bytes=10_000)
    app = app_of(held.generator, config)
    big = chat("x" * 2000, stream=False)
    async with http_client(app) as client:
        async with (
            AsgiCall(app, raw_body=[b"{" * 4000, b" " * 4000], body_ends=False) as upload,
            AsgiCall(app, raw_body=[b"{"], body_ends=False) as slow,
        ):
            while upload.num_chunks_read < 2 or slow.num_chunks_read < 1:  # noqa: ASYNC110 - told nothing to wait for
                await asyncio.sleep(0)
            refusal = await client.post(URL, json=big)
            assert error_of(refusal, 503)["code"] == "server_overloaded"
            assert int(refusal.headers["retry-after"]) >= 1
            held.gate.set()
            assert (
                await client.post(URL, json=chat())
            ).status_code == 200  # it fits, and counts no more afterwards
            assert (await client.post(URL, json=chat())).status_code == 200
            rejected = 'omni_admission_rejections_total{reason="max_total_body_size"} 1.0'
            assert rejected in (await client.get("/metrics")).text
        assert (await client.post(URL, json=big)).status_code == 200
    assert len(held.generator.requests) == 3


@pytest.mark.parametrize(("stream", "status"), [(True, 200), (False, 503)])
async def test_body_counts_until_its_answer_begins(stream: bool, status: int) -> None:
    held = Held()
    app = app_of(held.generator, ApiConfig(max_body_bytes=4000, max_total_body_bytes=4000))
    async with http_client(app) as client, AsgiCall(app, chat("x" * 3000, stream=stream)) as call:
        await held.until_running(1)
        if stream:
            await call.message()
        second = asyncio.create_task(client.post(URL, json=chat("x" * 3000)))
        if stream:
            await held.until_running(2)
        held.gate.set()
        assert (await second).status_code == status


@pytest.mark.parametrize("end", ["too large", "too slow", "no JSON", "client leaves"])
async def test_a_body_that_came_to_nothing_counts_no_more(end: str) -> None:
    config = ApiConfig(
        max_body_bytes=3500, max_total_body_bytes=4000, body_timeout_s=0.05 if end == "too slow" else 60
    )
    app = app_of(FakeGenerator(), config)
    chunks = [b"{" * 3000, b"{" * 900] if end == "too large" else [b"{" * 3000]
    async with AsgiCall(app, raw_body=chunks, body_ends=end == "no JSON") as call:
        if end == "client leaves":
            call.leave()
        await asyncio.wait_for(call.task, 10)
    assert (await post(app, chat("x" * 3000))).status_code == 200
