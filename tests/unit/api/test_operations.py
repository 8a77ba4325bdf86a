"""Operations: request ids on every answer, stalled connections, the description."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from omni_server.api.config import ApiConfig
from tests.unit.api.clients import URL, app_of, chat, http_client
from tests.unit.api.fake_generator import FakeGenerator
from tests.unit.api.test_auth import KEY, bearer
from tests.unit.api.test_server import Life, client_of, served


@pytest.mark.parametrize(
    ("status", "method", "path"),
    [
        (200, "GET", "/health"),
        (200, "GET", "/metrics"),
        (200, "POST", URL),
        (400, "POST", URL),
        (401, "GET", "/v1/models"),
        (404, "GET", "/nope"),
        (405, "GET", URL),
        (413, "POST", URL),
        (500, "POST", URL),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_every_response_has_a_request_id(status: int, method: str, path: str, stream: bool) -> None:
    generator = FakeGenerator()
    if status == 500:
        generator.submit_error = RuntimeError("odd")
    body = (
        {400: chat(None), 413: chat("x" * 3000)}.get(status, chat(stream=stream))
        if method == "POST"
        else None
    )
    headers = {"X-Request-Id": "mine"} | ({} if status == 401 else bearer(KEY))
    async with http_client(app_of(generator, ApiConfig(api_keys=(KEY,), max_body_bytes=2000))) as client:
        response = await client.request(method, path, json=body, headers=headers)
    assert response.status_code == status
    assert response.headers.get_list("x-request-id") == ["mine"]
    is_stream = (
        response.headers["content-type"].startswith("text/event-stream") if response.content else False
    )
    assert ("openai-processing-ms" in response.headers) == (not is_stream)
    if not is_stream:
        assert int(response.headers["openai-processing-ms"]) >= 0


async def test_stalled_connections_do_not_block_probes() -> None:
    life = Life()
    async with served(life), AsyncExitStack() as stack:
        port = int(life.address.rpartition(":")[2])
        head = f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n"
        for begun in (head.encode(), head.encode() + b"\r\n", head.encode() + b'\r\n{"model":'):
            for _ in range(30):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                stack.callback(writer.close)
                writer.write(begun)
                await writer.drain()
        async with client_of(life.address) as client:
            for path in ("/health", "/ready", "/metrics"):
                assert (await client.get(path)).status_code == 200
            assert (await client.post(URL, json=chat())).status_code == 200


async def test_description_is_valid_openapi() -> None:
    async with http_client(app_of(FakeGenerator())) as client:
        document = (await client.get("/openapi.json")).json()
    assert list(OpenAPIV31SpecValidator(document).iter_errors()) == []
    assert {"/metrics", "/load", "/health", "/ready", "/live", "/version"} <= set(document["paths"])
