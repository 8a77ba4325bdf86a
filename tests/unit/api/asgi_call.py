"""One request to an ASGI application, its response seen message by message, and the client able to leave."""

import asyncio
import json
from collections.abc import MutableMapping
from types import TracebackType
from typing import Any

from starlette.types import ASGIApp


class AsgiCall:
    """`async with AsgiCall(app, body) as call:` runs the request in the background."""

    def __init__(
        self,
        app: ASGIApp,
        body: object = None,
        *,
        path: str = "/v1/chat/completions",
        method: str = "POST",
        raw_body: list[bytes] | None = None,
        body_ends: bool = True,
    ) -> None:
        self._app = app
        self._chunks = raw_body if raw_body is not None else [json.dumps(body).encode()]
        self._body_ends = body_ends
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self._left = asyncio.Event()
        self._messages: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self.num_chunks_read = 0

    async def __aenter__(self) -> "AsgiCall":
        self.task = asyncio.ensure_future(self._app(self._scope, self._receive, self._send))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave()
        await asyncio.wait_for(self.task, 10)

    def set_content_type(self, content_type: str) -> None:
        """Before the request begins; JSON otherwise."""
        self._scope["headers"] = [(b"content-type", content_type.encode())]

    def leave(self) -> None:
        """The client closes the connection."""
        self._left.set()

    async def message(self) -> MutableMapping[str, Any]:
        return await asyncio.wait_for(self._messages.get(), 10)

    async def body_until(self, part: bytes) -> bytes:
        """The body as sent so far, as soon as it contains `part`."""
        body = b""
        while part not in body:
            message = await self.message()
            if message["type"] == "http.response.body":
                body += message["body"]
        return body

    async def _receive(self) -> MutableMapping[str, Any]:
        if self.num_chunks_read < len(self._chunks):
            chunk = self._chunks[self.num_chunks_read]
            self.num_chunks_read += 1
            more_body = self.num_chunks_read < len(self._chunks) or not self._body_ends
            return {"type": "http.request", "body": chunk, "more_body": more_body}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if not self._left.is_set():
            self._messages.put_nowait(message)
