"""WebSocket sessions of any kind: accepts or refuses connections, and serves each until it closes."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from fastapi import WebSocket, WebSocketDisconnect

from omni_server.api.config import ApiConfig
from omni_server.api.errors import error_response, unexpected_error
from omni_server.api.parse import check_model
from omni_server.api.realtime.outbox import Outbox, SlowClientError
from omni_server.api.state import ServerState
from omni_server.errors import InvalidRequestError, OmniError, OverloadedError
from omni_server.types import ModelInfo

logger = logging.getLogger(__name__)

_SUBPROTOCOL = "realtime"
"""Browsers offer it with `openai-insecure-api-key.<key>`, because they cannot set headers."""
_CLOSE_TIMEOUT_S = 5.0
_RELEASE_TIMEOUT_S = 10.0

_NORMAL, _GOING_AWAY, _POLICY, _INTERNAL = 1000, 1001, 1008, 1011


class Session(Protocol):
    """What happens in one connection. Calls of `handle` do not overlap; it gets None for a binary frame.
    `answers` are those in progress. `close` releases everything without sending anything."""

    id: str

    @property
    def answers(self) -> list[asyncio.Task[None]]: ...

    async def handle(self, text: str | None) -> None: ...

    def send_error(self, error: OmniError) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class _End:
    """Why a connection ends."""

    reason: str
    code: int | None
    """Close code; None if the client has disconnected."""
    error: OmniError | None = None
    """Sent before the close frame."""


_CLIENT_LEFT = _End("the client has left", None)


async def serve_session(
    websocket: WebSocket,
    state: ServerState,
    config: ApiConfig,
    open_session: Callable[[ModelInfo, Outbox], Session],
) -> None:
    """Refuses the upgrade with the status and body of an HTTP error, or serves until the end. `open_session`
    raises `OmniError` for a model that does not suit it."""

    async def send(frame: str | bytes) -> None:
        await (websocket.send_text(frame) if isinstance(frame, str) else websocket.send_bytes(frame))

    try:
        model = state.require_generator().model_info
        check_model(websocket.query_params.get("model", model.name), model)
        if state.num_sessions >= config.realtime_max_sessions:
            raise OverloadedError("The server has as many realtime sessions as it serves.")
        outbox = Outbox(send, config.realtime_send_timeout_s)
        session = open_session(model, outbox)
    except OmniError as error:
        await websocket.send_denial_response(error_response(error))
        return
    state.num_sessions += 1
    try:
        offered: list[str] = websocket.scope["subprotocols"]
        await websocket.accept(subprotocol=_SUBPROTOCOL if _SUBPROTOCOL in offered else None)
        began = time.monotonic()
        end = await _Connection(websocket, session, outbox, state).run(config)
        ended_s = time.monotonic() - began
        logger.info("session %s ended after %.1f s: %s", session.id, ended_s, end.reason)
    finally:
        state.num_sessions -= 1


@dataclass(frozen=True)
class _Connection:
    websocket: WebSocket
    """Already accepted."""
    session: Session
    outbox: Outbox
    state: ServerState

    async def run(self, config: ApiConfig) -> _End:
        """Returns when the connection is closed and everything it held is released."""
        with contextlib.ExitStack() as held:
            sending = asyncio.create_task(self._send())
            others = (
                asyncio.create_task(self._receive(config.realtime_idle_timeout_s)),
                asyncio.create_task(self._finish_with_server(held)),
                asyncio.create_task(_expire(config.realtime_session_timeout_s)),
            )
            try:
                done, _ = await asyncio.wait({sending, *others}, return_when=asyncio.FIRST_COMPLETED)
                end = done.pop().result()
                await _cancel(*others)
                await self.session.close()
                await self._close(end, sending, min(config.realtime_send_timeout_s, _CLOSE_TIMEOUT_S))
            finally:
                await _cancel(sending, *others)
                await self.session.close()
            return end

    async def _receive(self, idle_timeout_s: float) -> _End:
        try:
            while True:
                try:
                    async with asyncio.timeout(idle_timeout_s):
                        message = await self.websocket.receive()
                except TimeoutError:
                    if self.session.answers:
                        continue
                    text = f"No event came for {idle_timeout_s:g} seconds."
                    return _End("idle", _NORMAL, InvalidRequestError(text, code="session_expired"))
                if message["type"] == "websocket.disconnect":
                    return _CLIENT_LEFT
                await self.session.handle(message.get("text"))
                # A client that sends faster than it is served must not starve the others.
                await asyncio.sleep(0)
        except Exception:
            logger.exception("session %s failed", self.session.id)
            return _End("an unforeseen error", _INTERNAL, unexpected_error())

    async def _send(self) -> _End:
        try:
            await self.outbox.run()
        except WebSocketDisconnect:
            return _CLIENT_LEFT
        except SlowClientError:
            error = InvalidRequestError("The client does not read what it is sent.", code="client_too_slow")
            return _End("the client is too slow", _POLICY, error)

    async def _finish_with_server(self, held: contextlib.ExitStack) -> _End:
        """On shutdown, keeps the server up until the current answer and the error have been sent."""
        await self.state.draining.wait()
        held.enter_context(self.state.request_in_flight())
        while answers := self.session.answers:
            await asyncio.wait(answers)
        error = OverloadedError("The server is shutting down.", code="server_shutting_down")
        return _End("the server is shutting down", _GOING_AWAY, error)

    async def _close(self, end: _End, sending: "asyncio.Task[_End]", timeout_s: float) -> None:
        if end.code is None:
            return
        with contextlib.suppress(TimeoutError, WebSocketDisconnect):
            async with asyncio.timeout(timeout_s):
                if end.error is not None:
                    if sending.done():
                        self.outbox.forget_all()
                        sending = asyncio.create_task(self._send())
                    self.session.send_error(end.error)
                sent = asyncio.create_task(self.outbox.wait_sent())
                try:
                    await asyncio.wait({sent, sending}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await _cancel(sent, sending)
                await self.websocket.close(end.code, end.reason)


async def release(tasks: Collection[asyncio.Task[None]], session_id: str) -> None:
    """Cancels the work of a session that is closed."""
    for task in tasks:
        task.cancel()
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=_RELEASE_TIMEOUT_S)
        if late:
            logger.error("session %s: %d requests were not released in time", session_id, len(late))


async def _cancel(*tasks: "asyncio.Task[_End] | asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _expire(session_timeout_s: float) -> _End:
    await asyncio.sleep(session_timeout_s)
    text = f"Your session hit the maximum duration of {session_timeout_s / 60:g} minutes."
    return _End("expired", _NORMAL, InvalidRequestError(text, code="session_expired"))
