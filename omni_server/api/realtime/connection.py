"""One WebSocket from its acceptance to its end, for whatever reason it ends."""

import asyncio
import contextlib
import logging
from dataclasses import dataclass

from fastapi import WebSocket, WebSocketDisconnect

from omni_server.api.config import ApiConfig
from omni_server.api.errors import unexpected_error
from omni_server.api.realtime.live_session import LiveSession
from omni_server.api.realtime.outbox import Outbox, SlowClientError
from omni_server.api.state import ServerState
from omni_server.errors import InvalidRequestError, OmniError, OverloadedError

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0

_NORMAL, _GOING_AWAY, _POLICY, _INTERNAL = 1000, 1001, 1008, 1011


@dataclass(frozen=True)
class End:
    """Why a connection ends."""

    reason: str
    code: int | None
    """Of the closing frame; None if the client has left, so that there is nobody to send one to."""
    error: OmniError | None = None
    """Told before it closes."""


_CLIENT_LEFT = End("the client has left", None)


class Connection:
    def __init__(self, websocket: WebSocket, session: LiveSession, outbox: Outbox, state: ServerState) -> None:
        """`websocket` has been accepted."""
        self._websocket = websocket
        self._session = session
        self._outbox = outbox
        self._state = state

    async def run(self, config: ApiConfig) -> End:
        """Returns when the connection is closed and everything that it held has been released."""
        with contextlib.ExitStack() as held:
            sending = asyncio.create_task(self._send())
            others = (
                asyncio.create_task(self._receive(config.realtime_idle_timeout_s)),
                asyncio.create_task(self._finish_with_server(held)),
                asyncio.create_task(_expire(config.realtime_session_timeout_s)),
            )
            try:
                self._session.begin()
                done, _ = await asyncio.wait({sending, *others}, return_when=asyncio.FIRST_COMPLETED)
                end = done.pop().result()
                await self._cancel(others)
                await self._session.close()
                await self._close(end, sending, min(config.realtime_send_timeout_s, _CLOSE_TIMEOUT_S))
            finally:
                await self._cancel((sending, *others))
                await self._session.close()
            return end

    async def _receive(self, idle_timeout_s: float) -> End:
        try:
            while True:
                try:
                    async with asyncio.timeout(idle_timeout_s):
                        message = await self._websocket.receive()
                except TimeoutError:
                    if self._session.is_busy:
                        continue
                    return End("idle", _NORMAL, _expired(f"No event came for {idle_timeout_s:g} seconds."))
                if message["type"] == "websocket.disconnect":
                    return _CLIENT_LEFT
                text = message.get("text")
                if isinstance(text, str):
                    await self._session.handle(text)
                else:
                    self._session.tell(
                        InvalidRequestError("Binary frames are not supported; send text.", code="invalid_event")
                    )
                # A client that sends faster than it is served must not keep others waiting.
                await asyncio.sleep(0)
        except Exception:
            logger.exception("realtime session %s failed", self._session.id)
            return End("an unforeseen error", _INTERNAL, unexpected_error())

    async def _send(self) -> End:
        try:
            await self._outbox.run()
        except WebSocketDisconnect:
            return _CLIENT_LEFT
        except SlowClientError:
            error = InvalidRequestError("The client does not read what it is sent.", code="client_too_slow")
            return End("the client is too slow", _POLICY, error)

    async def _finish_with_server(self, held: contextlib.ExitStack) -> End:
        """The server waits for the answer that is being given, and until the client has been told."""
        await self._state.draining_begun.wait()
        held.enter_context(self._state.request_in_flight())
        await self._session.wait_answered()
        error = OverloadedError("The server is shutting down.", code="server_shutting_down")
        return End("the server is shutting down", _GOING_AWAY, error)

    async def _close(self, end: End, sending: "asyncio.Task[End]", timeout_s: float) -> None:
        if end.code is None:
            return
        with contextlib.suppress(TimeoutError, WebSocketDisconnect):
            async with asyncio.timeout(timeout_s):
                if end.error is not None:
                    if sending.done():
                        self._outbox.forget_all()
                        sending = asyncio.create_task(self._send())
                    self._session.tell(end.error)
                sent = asyncio.create_task(self._outbox.wait_sent())
                try:
                    await asyncio.wait({sent, sending}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await self._cancel((sent, sending))
                await self._websocket.close(end.code, end.reason)

    @staticmethod
    async def _cancel(tasks: "tuple[asyncio.Task[End] | asyncio.Task[None], ...]") -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _expire(session_timeout_s: float) -> End:
    await asyncio.sleep(session_timeout_s)
    text = f"Your session hit the maximum duration of {session_timeout_s / 60:g} minutes."
    return End("expired", _NORMAL, _expired(text))


def _expired(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, code="session_expired")
