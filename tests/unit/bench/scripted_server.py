"""A server of a few lines that streams known frames, so that what the load generator finds can be counted by
hand."""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web
from pydantic import JsonValue

Json = dict[str, JsonValue]


@dataclass(frozen=True)
class Pause:
    seconds: float


@dataclass(frozen=True)
class Reply:
    """What a request is answered with: a body if `status` is not 200, else `parts` of a stream."""

    parts: tuple[bytes | Pause, ...] = ()
    status: int = 200
    body: bytes = b""
    break_off: bool = False
    """Close the connection in the middle of the answer."""


@dataclass
class ScriptedServer:
    """Runs in a thread of its own from the constructor to `close`. `reply` answers the chat requests and
    those for images, in order of arrival: it gets the body and the number of the request."""

    reply: Callable[[Json, int], Reply]
    models: Json = field(default_factory=lambda: {"data": [{"id": "scripted", "voices": ["Ada", "Grace"]}]})
    models_status: int = 200
    requests: list[Json] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    in_flight: int = 0
    peak_in_flight: int = 0

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._runner = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> web.AppRunner:
        application = web.Application()
        application.router.add_get("/v1/models", self._list_models)
        application.router.add_get("/version", self._show_version)
        application.router.add_post("/v1/chat/completions", self._reply)
        application.router.add_post("/v1/images/generations", self._reply)
        runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def _list_models(self, request: web.Request) -> web.Response:
        return web.json_response(self.models, status=self.models_status)

    async def _show_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "1.2.3"})

    async def _reply(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.requests.append(body)
        self.authorizations.append(request.headers.get("Authorization"))
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            return await self._answer(request, self.reply(body, len(self.requests) - 1))
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        if reply.status != 200:
            return web.Response(status=reply.status, body=reply.body)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for part in reply.parts:
            if isinstance(part, Pause):
                await asyncio.sleep(part.seconds)
            else:
                await stream.write(part)
        if reply.break_off:
            assert request.transport is not None
            request.transport.close()
        else:
            await stream.write_eof()
        return stream


Start = Callable[[Callable[[Json, int], Reply]], ScriptedServer]
"""Starts a server that ends with the test."""
