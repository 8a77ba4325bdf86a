"""Failures around the routes: every one has the envelope and a request id."""

import json
import re

import httpx2
import pytest

from omni_server.api.config import ApiConfig
from omni_server.errors import (
    DeadlineExceededError,
    OmniError,
    OverloadedError,
    StageDeadError,
    StageDownError,
    StageError,
)
from tests.unit.api.asgi_call import AsgiCall
from tests.unit.api.clients import URL, Endpoint, app_of, chat, each_endpoint, error_of, http_client, post
from tests.unit.api.fake_generator import FakeGenerator, text_script


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/nope"), ("POST", "/v1/nope"), ("GET", "/v1/chat/completions/")]
)
async def test_unknown_url(method: str, path: str) -> None:
    async with http_client(app_of(FakeGenerator())) as client:
        error = error_of(await client.request(method, path), 404)
    assert error["code"] == "unknown_url"
    assert error["message"] == f"Invalid URL ({method} {path})."


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", URL, "POST"),
        ("DELETE", "/v1/models", "GET"),
        # Each method is a route of its own.
        ("DELETE", "/health", "GET, HEAD"),
        ("DELETE", "/ping", "GET, POST"),
        ("OPTIONS", "/", "GET, HEAD"),
    ],
)
async def test_wrong_method_says_what_is_allowed(method: str, path: str, allow: str) -> None:
    async with http_client(app_of(FakeGenerator())) as client:
        response = await client.request(method, path)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == allow


async def test_body_that_grows_above_the_limit_is_not_read_to_its_end() -> None:
    chunks = [b" " * 400] * 100
    async with AsgiCall(app_of(FakeGenerator(), ApiConfig(max_body_bytes=1000)), raw_body=chunks) as call:
        assert (await call.message())["status"] == 413
        assert json.loads((await call.message())["body"])["error"]["code"] == "request_too_large"
    assert call.num_chunks_read == 3


async def test_body_of_exactly_the_limit_is_served() -> None:
    body = json.dumps(chat()).encode()
    app = app_of(FakeGenerator(), ApiConfig(max_body_bytes=len(body)))
    async with http_client(app) as client:
        assert (await client.post(URL, content=body, headers={"content-type": "application/json"})).is_success


FAILURES: list[tuple[Exception, int, str]] = [
    (OverloadedError("full"), 503, "server_overloaded"),
    (OverloadedError("later", code="model_not_ready"), 503, "model_not_ready"),
    (StageDeadError("talker", "gone"), 503, "engine_dead"),
    (StageDownError("talker"), 503, "talker_down"),
    (DeadlineExceededError("late"), 504, "request_timeout"),
    (StageError("talker", "failed"), 500, "internal_error"),
    (OmniError("odd"), 500, "internal_error"),
    (RuntimeError("/srv/secret.py line 5"), 500, "internal_error"),
]


@pytest.mark.parametrize(("failure", "status", "code"), FAILURES)
@pytest.mark.parametrize("where", ["submission", "generation"])
@each_endpoint
async def test_failure_has_its_status_and_retry_advice(
    endpoint: Endpoint, failure: Exception, status: int, code: str, where: str
) -> None:
    generator = FakeGenerator(script=[*text_script()[:2], failure])
    if where == "submission":
        generator.submit_error = failure
    async with http_client(app_of(generator)) as client:
        response = await client.post(endpoint.url, json=endpoint.body())
    error = error_of(response, status)
    assert error["code"] == code
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    if status == 503:
        assert 1 <= int(response.headers["retry-after"]) <= 120
    else:
        assert response.headers["x-should-retry"] == "false"
    if where == "generation":
        assert generator.generations[0].num_closed == 1


async def test_unforeseen_failure_is_logged_with_the_request_id(caplog: pytest.LogCaptureFixture) -> None:
    generator = FakeGenerator()
    generator.submit_error = RuntimeError("surprise")
    await post(app_of(generator), chat(), {"X-Request-Id": "mine-1"})
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "mine-1" in record.getMessage()
    assert record.exc_info is not None


@pytest.mark.parametrize("given", ["abc", "A.b_c-1", "x" * 128])
async def test_well_formed_request_id_is_echoed(given: str) -> None:
    response = await post(app_of(FakeGenerator()), chat(stream=True), {"X-Request-Id": given})
    assert response.headers["x-request-id"] == given
    assert response.headers.get_list("x-request-id") == [given]


@pytest.mark.parametrize(
    "given", [None, "", "x" * 129, "x" * 4096, "a b", "a\tb", "ü".encode().decode("latin-1")]
)
async def test_other_request_ids_are_replaced(given: str | None) -> None:
    headers = None if given is None else httpx2.Headers([(b"x-request-id", given.encode("latin-1"))])
    response = await post(app_of(FakeGenerator()), chat(), headers)
    assert re.fullmatch(r"req_[0-9a-f]{32}", response.headers["x-request-id"])


async def test_requests_with_the_same_id_get_answers_of_their_own() -> None:
    generator = FakeGenerator()
    app = app_of(generator)
    for _ in range(2):
        await post(app, chat(), {"X-Request-Id": "same"})
    assert generator.requests[0].request_id != generator.requests[1].request_id
