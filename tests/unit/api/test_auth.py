"""API keys: what needs one, what is open, and that WebSockets are covered."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import WebSocket
from starlette.types import ASGIApp

from omni_server.api.access import ApiKeys, read_key_file
from omni_server.api.app import create_app
from omni_server.api.config import ApiConfig
from omni_server.api.request_record import current_request
from omni_server.api.state import ServerState
from omni_server.errors import ConfigError
from tests.unit.api.clients import URL, Endpoint, app_of, chat, each_endpoint, error_of, http_client
from tests.unit.api.fake_generator import FakeGenerator
from tests.unit.api.schema import check_error

KEY = "sk-correct-horse"
OTHER_KEY = "sk-battery-staple"
GUARDED = ApiConfig(api_keys=(KEY, OTHER_KEY))


def bearer(key: str, scheme: str = "Bearer") -> dict[str, str]:
    return {"Authorization": f"{scheme} {key}"}


@pytest.mark.parametrize(
    "headers", [bearer(KEY), bearer(OTHER_KEY), bearer(KEY, "bearer"), bearer(f"  {KEY} ")]
)
@each_endpoint
async def test_any_of_the_keys_opens_the_api(endpoint: Endpoint, headers: dict[str, str]) -> None:
    async with http_client(app_of(FakeGenerator(), GUARDED), headers=headers) as client:
        assert (await client.post(endpoint.url, json=endpoint.body())).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        bearer(""),
        bearer(KEY[:-1]),
        bearer(KEY + "x"),
        bearer(KEY.upper()),
        bearer(f"{KEY} {OTHER_KEY}"),
        bearer(KEY, "Basic"),
        {"Authorization": KEY},
        {"api-key": KEY},
        {"Authorization": "Bearer \xff\xfe"},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", URL), ("GET", "/v1/models"), ("GET", "/v1/nope"), ("GET", "/openapi.json"), ("GET", "/docs")],
)
async def test_without_a_known_key_there_is_401(headers: dict[str, str], method: str, path: str) -> None:
    generator = FakeGenerator()
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    async with http_client(app_of(generator, GUARDED)) as client:
        response = await client.request(method, path, headers=httpx2.Headers(raw), content=b"{")
    error = error_of(response, 401)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert response.headers["www-authenticate"].startswith("Bearer")
    assert KEY[:-1] not in response.text
    assert generator.requests == []


@pytest.mark.parametrize(
    "path",
    ["/health", "/healthz", "/ready", "/readyz", "/live", "/livez", "/ping", "/version", "/metrics", "/load"],
)
async def test_probes_and_metrics_need_no_key(path: str) -> None:
    async with http_client(app_of(FakeGenerator(), GUARDED)) as client:
        assert (await client.get(path)).status_code == 200
        # Nor does a wrong one harm.
        assert (await client.get(path, headers=bearer("wrong"))).status_code == 200


async def test_metrics_need_a_key_where_asked() -> None:
    async with http_client(
        app_of(FakeGenerator(), ApiConfig(api_keys=(KEY,), metrics_need_key=True))
    ) as client:
        for path in ("/metrics", "/load"):
            error_of(await client.get(path), 401)
            assert (await client.get(path, headers=bearer(KEY))).status_code == 200
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/audio/voices", "/v1/audio/models"])
async def test_voice_lists_are_open_unless_told_otherwise(path: str) -> None:
    for is_public in (True, False):
        app = app_of(FakeGenerator(), ApiConfig(api_keys=(KEY,), public_voice_lists=is_public))
        async with http_client(app) as client:
            assert ((await client.get(path)).status_code != 401) == is_public
            # The lists only: what has their path as its beginning is not.
            error_of(await client.get(path + "/x"), 401)
            error_of(await client.post(path), 401)


async def test_open_paths_are_open_behind_a_prefix_and_no_others() -> None:
    config = ApiConfig(api_keys=(KEY,), root_path="/omni")
    async with http_client(app_of(FakeGenerator(), config)) as client:
        for path in ("/omni/health", "/health"):  # the proxy may have removed the prefix
            assert (await client.get(path)).status_code == 200
        for path in ("/omni/v1/models", "/omnihealth", "/omni/omni/health", "/v1/models", "/health/"):
            error_of(await client.get(path), 401)
        assert (await client.get("/omni/v1/models", headers=bearer(KEY))).status_code == 200


async def test_the_callers_name_is_told_to_the_stages() -> None:
    generator = FakeGenerator()
    async with http_client(app_of(generator, GUARDED)) as client:
        for key in (OTHER_KEY, KEY):
            assert (await client.post(URL, json=chat("Hello"), headers=bearer(key))).status_code == 200
    assert [request.caller for request in generator.requests] == ["key-2", "key-1"]


@pytest.mark.parametrize("keys", [("",), (KEY, ""), ("two words",), ("line\nbreak",)])
def test_keys_that_cannot_be_meant_are_refused(keys: Sequence[str]) -> None:
    with pytest.raises(ConfigError, match="an API key is empty, or holds"):
        ApiKeys(keys)


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# the team's\n{KEY}\n\n  {OTHER_KEY}  \n")
    assert read_key_file(path) == (KEY, OTHER_KEY)


@pytest.mark.parametrize("content", ["", "\n# nothing\n", None])
def test_a_file_without_keys_is_refused_rather_than_open_to_all(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=str(path)):
        read_key_file(path)


def test_configuration_does_not_show_keys() -> None:
    assert KEY not in repr(GUARDED)


# -- WebSockets


class WebSocketCall:
    """An upgrade request to an ASGI application, and what it answers."""

    def __init__(self, headers: dict[str, str] | None = None, subprotocols: Sequence[str] = ()) -> None:
        given = {"host": "localhost:8091"} | (headers or {})
        self.scope: dict[str, Any] = {
            "type": "websocket",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "scheme": "ws",
            "path": "/v1/scripted-session",
            "raw_path": b"/v1/scripted-session",
            "query_string": b"model=omni",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
            "subprotocols": list(subprotocols),
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "extensions": {"websocket.http.response": {}},
        }
        self.sent: list[dict[str, Any]] = []

    async def run(self, config: ApiConfig) -> "WebSocketCall":
        app = create_app(ServerState(FakeGenerator()), config)

        @app.websocket("/v1/scripted-session")
        async def realtime(websocket: WebSocket) -> None:
            await websocket.accept()
            record = current_request()
            await websocket.send_text("nobody" if record is None else record.caller)
            await websocket.close()

        await self.send_to(app)
        return self

    async def send_to(self, app: ASGIApp) -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            self.sent.append(message)

        await app(self.scope, receive, send)

    @property
    def status(self) -> int:
        first = self.sent[0]
        return 101 if first["type"] == "websocket.accept" else int(first["status"])

    def error(self) -> dict[str, Any]:
        body = httpx2.Response(200, content=self.sent[1]["body"]).json()
        check_error(body)
        error: dict[str, Any] = body["error"]
        return error


@pytest.mark.parametrize(
    ("headers", "subprotocols"),
    [
        (bearer(OTHER_KEY), ()),
        ({}, ("realtime", f"openai-insecure-api-key.{OTHER_KEY}", "openai-beta.realtime-v1")),
    ],
)
async def test_websocket_is_opened_by_header_or_subprotocol(
    headers: dict[str, str], subprotocols: list[str]
) -> None:
    call = await WebSocketCall(headers, subprotocols).run(GUARDED)
    assert call.status == 101
    assert call.sent[1]["text"] == "key-2"
    assert dict(call.sent[0]["headers"])[b"x-request-id"].startswith(b"req_")


@pytest.mark.parametrize(
    ("headers", "subprotocols"),
    [({}, ()), (bearer("wrong"), ()), ({}, ("realtime", "openai-insecure-api-key.wrong")), ({}, (KEY,))],
)
async def test_websocket_without_a_known_key_is_answered_with_401(
    headers: dict[str, str], subprotocols: list[str]
) -> None:
    call = await WebSocketCall(headers, subprotocols).run(GUARDED)
    assert call.status == 401
    assert call.error()["code"] == "invalid_api_key"
    headers_sent = dict(call.sent[0]["headers"])
    assert headers_sent[b"www-authenticate"].startswith(b"Bearer")
    assert headers_sent[b"x-request-id"].startswith(b"req_")
