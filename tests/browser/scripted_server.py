"""The real application on a real port, with a scripted generator instead of engines."""

import asyncio
import json
import socket
import threading

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from omni_server.api.app import create_app
from omni_server.api.config import ApiConfig
from omni_server.api.state import ServerState
from omni_server.api.websocket_protocol import WebSocketProtocol
from tests.unit.api.fake_generator import FakeGenerator


class ScriptedServer:
    """Runs in a thread from construction to `close`. Its attributes may be changed between requests."""

    def __init__(self) -> None:
        self.reset()
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        config = uvicorn.Config(
            self._serve,
            interface="asgi3",
            log_config=None,
            lifespan="off",
            ws=WebSocketProtocol,
            timeout_graceful_shutdown=1,
        )
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: self._uvicorn.run(sockets=[listener]))
        self._thread.start()

    def reset(self, config: ApiConfig | None = None) -> None:
        self.generator = FakeGenerator()
        self.state = ServerState(self.generator)
        self.key: str | None = None
        """Required under /v1/."""
        self.voices: list[dict[str, str | None]] | None = None
        """What `/v1/audio/voices` lists; None leaves that path to the application."""
        self._app: ASGIApp = create_app(self.state, config or ApiConfig())
        self._loop: asyncio.AbstractEventLoop | None = None

    def set(self, event: asyncio.Event) -> None:
        """Lets a generator go on that waits for `event`."""
        assert self._loop is not None, "nothing has been asked yet"
        self._loop.call_soon_threadsafe(event.set)

    def close(self) -> None:
        self._uvicorn.should_exit = True
        self._thread.join()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._loop = asyncio.get_running_loop()
        path = scope["path"]
        if path.startswith("/v1/") and not self._is_let_in(scope):
            error = {"message": "Incorrect API key provided.", "type": "authentication_error", "param": None}
            return await _send_json(send, 401, {"error": error | {"code": "invalid_api_key"}})
        if path == "/v1/audio/voices" and self.voices is not None:
            return await _send_json(send, 200, {"voices": self.voices})
        return await self._app(scope, receive, send)

    def _is_let_in(self, scope: Scope) -> bool:
        if scope["type"] == "websocket":
            return self.key is None or f"openai-insecure-api-key.{self.key}" in scope["subprotocols"]
        return (
            self.key is None or dict(scope["headers"]).get(b"authorization") == f"Bearer {self.key}".encode()
        )


async def _send_json(send: Send, status: int, content: object) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})
