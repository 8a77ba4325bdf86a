"""uvicorn's WebSocket connections, with a bound on fragments and pongs, and the API's error envelope."""

import http
import logging
from contextlib import suppress
from typing import Any

from uvicorn import Config
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
"""Per message. A byte limit alone would allow endless empty fragments; clients that send 15 MiB of audio in
pieces need some thousand."""


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One connection; uvicorn creates one per upgrade: `uvicorn.Config(ws=WebSocketProtocol)`."""

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__(config, server_state, app_state)
        self.conn = _Handshake(max_size=config.ws_max_size, logger=logging.getLogger("uvicorn.error"))

    def data_received(self, data: bytes) -> None:
        with suppress(InvalidState):  # uvicorn answers a broken message, behind which the client has left
            super().data_received(data)
        if left := self.conn.data_to_send():  # the end of the session, or the refusal of a broken handshake
            self.transport.write(b"".join(left))
            self.transport.close()

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
        elif not self.close_sent:
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, f"more than {MAX_FRAGMENTS} fragments")
            self.handle_parser_exception()

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()  # drops the pong, as RFC 6455 (5.5.3) allows


class _Handshake(ServerProtocol):
    """Refuses upgrades with the API's error envelope."""

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
