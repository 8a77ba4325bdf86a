"""WebSocket connections as uvicorn serves them, with the bounds that it lacks."""

import asyncio
import http
import logging
from contextlib import suppress
from typing import Any

from uvicorn._types import ASGISendEvent
from uvicorn.config import Config
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.exceptions import InvalidState
from websockets.frames import CloseCode, Frame
from websockets.http11 import Response
from websockets.server import ServerProtocol

from omni_server.api.errors import error_response, unexpected_error
from omni_server.api.request_record import new_request_id
from omni_server.errors import InvalidRequestError

MAX_FRAGMENTS = 65536
"""Of one message. Empty ones would come without end, whatever the limit of bytes is; clients that send 15 MiB
of audio in pieces need some thousand."""


class BoundedWebSocketProtocol(WebSocketsSansIOProtocol):
    """Holds little for a client that floods it, and takes one that has left for just that.

    uvicorn answers every ping, whether the client reads or not: what it does not read would be kept
    without limit. It raises `RuntimeError` to whoever sends on a connection that was closed in the
    meantime, which is nobody's fault.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _Handshake(max_size=self.config.ws_max_size, logger=logging.getLogger("uvicorn.error"))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # A line that websockets finds too long: uvicorn would neither send its answer nor close the
            # connection.
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()  # not written: RFC 6455 (5.5.3) lets pongs be left out

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
        elif not self.close_sent:
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, f"more than {MAX_FRAGMENTS} fragments")
            self.handle_parser_exception()

    def send_receive_event_to_app(self) -> None:
        # Invalid text with the client's close behind it: websockets has answered the close when it read it.
        # The close is the next event, and ends the session.
        with suppress(InvalidState):
            super().send_receive_event_to_app()

    async def send(self, message: ASGISendEvent) -> None:
        await self.writable.wait()
        if self.transport.is_closing() or (self.close_sent and self.initial_response is None):
            raise ClientDisconnected
        await super().send(message)


class _Handshake(ServerProtocol):
    """Refuses upgrades in the envelope that all errors have."""

    def reject(self, status: http.HTTPStatus | int, text: str) -> Response:
        response = super().reject(status, text)
        error = unexpected_error()
        if response.status_code < 500:
            message = text.partition("\n")[0] or f"{response.reason_phrase}."
            error = InvalidRequestError(message, code="invalid_websocket_handshake")
            error.status = response.status_code
        answer = error_response(error, {"x-request-id": new_request_id()})
        response.body = bytes(answer.body)
        for name, value in answer.headers.items():
            response.headers.pop(name, None)  # or both would be sent
            response.headers[name] = value
        return response
