"""Operations: request ids on every answer, the description."""

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from omni_server.api.config import ApiConfig
from tests.unit.api.clients import URL, app_of, chat, http_client
from tests.unit.api.fake_generator import FakeGenerator
from tests.unit.api.test_auth import KEY, bearer


@pytest.mark.parametrize("status", [200, 400, 401, 404, 405, 413, 500])
@pytest.mark.parametrize("stream", [True, False])
async def test_every_response_has_a_request_id(status: int, stream: bool) -> None:
    generator = FakeGenerator()
    if status == 500:
        generator.submit_error = RuntimeError("odd")
    method, path, body = {
        400: ("POST", URL, chat(None)),
        404: ("GET", "/nope", None),
        405: ("GET", URL, None),
        413: ("POST", URL, chat("x" * 3000)),
    }.get(status, ("POST", URL, chat(stream=stream)))
    headers = {"X-Request-Id": "mine"} | bearer("wrong" if status == 401 else KEY)
    async with http_client(app_of(generator, ApiConfig(api_keys=(KEY,), max_body_bytes=2000))) as client:
        response = await client.request(method, path, json=body, headers=headers)
    assert response.status_code == status
    assert response.headers.get_list("x-request-id") == ["mine"]
    if response.headers["content-type"].startswith("text/event-stream"):
        assert "openai-processing-ms" not in response.headers
    else:
        assert int(response.headers["openai-processing-ms"]) >= 0


async def test_description_is_valid_openapi() -> None:
    async with http_client(app_of(FakeGenerator())) as client:
        document = (await client.get("/openapi.json")).json()
    assert list(OpenAPIV31SpecValidator(document).iter_errors()) == []
    assert {"/metrics", "/load", "/health", "/ready", "/live", "/version"} <= set(document["paths"])
