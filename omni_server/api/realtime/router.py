"""`/v1/realtime`: accepts or refuses connections, and serves each WebSocket until it closes."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from omni_server.api.config import ApiConfig
from omni_server.api.errors import error_response, unexpected_error
from omni_server.api.media_loader import MediaLoader
from omni_server.api.parse import check_model
from omni_server.api.realtime.input_buffer import InputBuffer
from omni_server.api.realtime.item_loader import ItemLoader
from omni_server.api.realtime.outbox import Outbox, SlowClientError
from omni_server.api.realtime.session import Session
from omni_server.api.realtime.vad import SileroModel, SpeechModel
from omni_server.api.state import ServerState
from omni_server.errors import InvalidRequestError, OmniError, OverloadedError

logger = logging.getLogger(__name__)

_SUBPROTOCOL = "realtime"
"""Browsers offer it with `openai-insecure-api-key.<key>`, because they cannot set headers."""
_CLOSE_TIMEOUT_S = 5.0

_NORMAL, _GOING_AWAY, _POLICY, _INTERNAL = 1000, 1001, 1008, 1011


@dataclass(frozen=True)
class _End:
    """Why a connection ends."""

    reason: str
    code: int | None
    """Close code; None if the client has disconnected."""
    error: OmniError | None = None
    """Sent before the close frame."""


_CLIENT_LEFT = _End("the client has left", None)


def realtime_router(
    state: ServerState,
    config: ApiConfig,
    media: MediaLoader,
    new_model: Callable[[], SpeechModel] = SileroModel,
) -> APIRouter:
    """`new_model` creates the speech detector of one audio stream."""
    router = APIRouter()
    num_sessions = 0

    @router.websocket("/v1/realtime", name="realtime")
    async def serve(websocket: WebSocket) -> None:
        """Refuses the upgrade with the status and body of an HTTP error, or serves until the end."""
        nonlocal num_sessions
        try:
            model = state.require_generator().model_info
            check_model(websocket.query_params.get("model", model.name), model)
            if model.text_stage is None and not model.voices:
                raise InvalidRequestError(
                    f"The model '{model.name}' holds no conversations.",
                    param="model",
                    code="unsupported_value",
                )
            if num_sessions >= config.realtime_max_sessions:
                raise OverloadedError("The server has as many realtime sessions as it serves.")
        except OmniError as error:
            await websocket.send_denial_response(error_response(error))
            return
        num_sessions += 1
        try:
            offered: list[str] = websocket.scope["subprotocols"]
            await websocket.accept(subprotocol=_SUBPROTOCOL if _SUBPROTOCOL in offered else None)
            outbox = Outbox(websocket.send_text, config.realtime_send_timeout_s)
            session = Session(
                model,
                state,
                outbox,
                InputBuffer(new_model, config.media_limits.max_audio_seconds),
                ItemLoader(media, config.media_limits, model),
                duration_s=config.realtime_session_timeout_s,
                max_speech_characters=config.max_speech_characters,
            )
            began = time.monotonic()
            end = await _Connection(websocket, session, outbox, state).run(config)
            ended_s = time.monotonic() - began
            logger.info("realtime session %s ended after %.1f s: %s", session.id, ended_s, end.reason)
        finally:
            num_sessions -= 1

    return router


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
                    if self.session.is_busy:
                        continue
                    text = f"No event came for {idle_timeout_s:g} seconds."
                    return _End("idle", _NORMAL, InvalidRequestError(text, code="session_expired"))
                if message["type"] == "websocket.disconnect":
                    return _CLIENT_LEFT
                await self.session.handle(message.get("text"))
                # A client that sends faster than it is served must not starve the others.
                await asyncio.sleep(0)
        except Exception:
            logger.exception("realtime session %s failed", self.session.id)
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
        await self.session.wait_answered()
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


async def _cancel(*tasks: "asyncio.Task[_End] | asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _expire(session_timeout_s: float) -> _End:
    await asyncio.sleep(session_timeout_s)
    text = f"Your session hit the maximum duration of {session_timeout_s / 60:g} minutes."
    return _End("expired", _NORMAL, InvalidRequestError(text, code="session_expired"))
