"""WebSocket connections of small applications: messages, refusals and ends."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
import websockets
from starlette.types import ASGIApp, Receive, Scope, Send

from omni_server.api.websocket_protocol import WebSocketProtocol
from tests.unit.api.test_websocket_bytes import HANDSHAKE

DEADLINE_S = 30.0


@asynccontextmanager
async def served(app: ASGIApp, **options: Any) -> AsyncIterator[int]:
    """The port."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, interface="asgi3", log_config=None, lifespan="off", ws=WebSocketProtocol, **options
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110 - a server can only be asked
        await asyncio.sleep(0.01)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, DEADLINE_S)


async def answer_to_handshake(app: ASGIApp) -> tuple[bytes, bytes]:
    """Head of the answer, and all that follows it; the client sends nothing more."""
    async with served(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HANDSHAKE)
        answer = await asyncio.wait_for(reader.read(), DEADLINE_S)
        writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    return head, rest


async def test_a_closed_session_is_refused_and_one_that_fails_is_an_error() -> None:
    async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "websocket.close"})

    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("unforeseen")

    for app, status, kind in ((refusing, b"403", "invalid_request_error"), (failing, b"500", "server_error")):
        head, body = await answer_to_handshake(app)
        assert head.startswith(b"HTTP/1.1 " + status)
        assert json.loads(body)["error"]["type"] == kind


async def test_nothing_more_is_read_before_a_message_has_been_taken() -> None:
    go_on = asyncio.Event()
    num_taken = 0

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_taken
        await receive()
        await send({"type": "websocket.accept"})
        await go_on.wait()
        while (await receive())["type"] == "websocket.receive":
            num_taken += 1

    async def flood(session: websockets.ClientConnection) -> None:
        for _ in range(200):
            await session.send(bytes(2**19))

    async with (
        served(slow, ws_max_size=2**20) as port,
        websockets.connect(f"ws://127.0.0.1:{port}/", ping_interval=None) as session,
    ):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(flood(session), 0.5)
        go_on.set()
    assert num_taken > 0
