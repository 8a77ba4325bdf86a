"""WebSocket connections for ASGI applications, based on websockets' Sans-I/O implementation."""

import asyncio
import http
import logging
import os
from typing import Any, cast
from urllib.parse import unquote

from starlette.types import Message, Scope
from uvicorn.config import Config
from uvicorn.server import ServerState
from websockets.datastructures import Headers
from websockets.exceptions import InvalidState
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol

from omni_server.api.errors import error_response, unexpected_error
from omni_server.api.request_record import new_request_id
from omni_server.errors import InvalidRequestError

logger = logging.getLogger(__name__)

MAX_FRAGMENTS = 65536
"""Per message. A byte limit alone would allow endless empty fragments; clients that send 15 MiB of audio in
pieces need some thousand."""
_CLOSE_TIMEOUT_S = 10.0
"""How long a client has to answer the server's close."""


class ClientGoneError(OSError):
    """Raised when the application sends on a closed connection. Frameworks expect an `OSError`."""


class WebSocketProtocol(asyncio.Protocol):
    """One connection; uvicorn creates one per upgrade: `uvicorn.Config(ws=WebSocketProtocol)`.

    Buffers little for a flooding client: it reads nothing before the application has received the last
    message, bounds fragments, and keeps no pongs for a client that does not read.
    """

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any]) -> None:
        self._config = config
        self._server_state = server_state
        self._app_state = app_state
        self._loop = asyncio.get_running_loop()
        self._conn = _Handshake(max_size=config.ws_max_size, logger=logging.getLogger("uvicorn.error"))
        self._transport: asyncio.Transport
        self._events: asyncio.Queue[Message] = asyncio.Queue()
        self._is_reading = True
        self._writable = asyncio.Event()
        self._writable.set()
        self._fragments: list[bytes] = []
        self._is_text = False
        self._has_failed = False
        """After a protocol violation, further frames are ignored."""
        self._has_closed = False
        """The application has closed or refused the session."""
        self._response: Response | None = None
        """The handshake response, until the application accepts or refuses the session."""
        self._refusal: Message | None = None
        """The head of the response with which the application refuses."""
        self._refusal_body = b""
        self._ping = b""
        """Payload of the unanswered ping."""
        self._timer: asyncio.TimerHandle | None = None
        """For the next ping, or the deadline of the last ping or the close."""

    # Called by the transport and by uvicorn

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not subclass it
        self._server_state.connections.add(self)  # type: ignore[arg-type]  # a union of uvicorn's own classes

    def connection_lost(self, exc: Exception | None) -> None:
        self._server_state.connections.discard(self)  # type: ignore[arg-type]
        self._set_timer(None)
        self._put_disconnect(CloseCode.ABNORMAL_CLOSURE)
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._conn.receive_data(data)
        for event in self._conn.events_received():
            if isinstance(event, Request):
                self._begin(event)
            elif isinstance(event, Frame):
                self._take(event)
        self._flush(are_pongs=True)

    def shutdown(self) -> None:
        """Ends the session."""
        if self._conn.state is State.OPEN:
            self._put_disconnect(CloseCode.SERVICE_RESTART)
            self._conn.send_close(CloseCode.SERVICE_RESTART)
            self._flush()
        else:
            self._refuse_unanswered()
        self._transport.close()

    # Receiving

    def _begin(self, request: Request) -> None:
        response = self._conn.accept(request)
        if response.status_code != http.HTTPStatus.SWITCHING_PROTOCOLS:
            self._conn.send_response(response)
            return
        self._response = response
        self._events.put_nowait({"type": "websocket.connect"})
        task = self._loop.create_task(self._run(self._scope(request)))
        self._server_state.tasks.add(task)
        task.add_done_callback(self._server_state.tasks.discard)

    def _take(self, frame: Frame) -> None:
        if self._has_failed:
            return
        if frame.opcode is Opcode.PONG and self._ping and bytes(frame.data) == self._ping:
            self._schedule_ping()
        if frame.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            return  # websockets itself answers pings and the client's close
        if frame.opcode is not Opcode.CONT:
            self._is_text, self._fragments = frame.opcode is Opcode.TEXT, []
        if len(self._fragments) >= MAX_FRAGMENTS:
            self._fail(CloseCode.MESSAGE_TOO_BIG, f"more than {MAX_FRAGMENTS} fragments")
            return
        self._fragments.append(bytes(frame.data))
        if not frame.fin:
            return
        data, self._fragments = b"".join(self._fragments), []
        if self._has_closed:
            return
        try:
            content: Message = {"text": data.decode()} if self._is_text else {"bytes": data}
        except UnicodeDecodeError:
            self._fail(CloseCode.INVALID_DATA)
            return
        self._events.put_nowait({"type": "websocket.receive", **content})
        if self._is_reading:
            self._is_reading = False
            self._transport.pause_reading()

    async def _receive(self) -> Message:
        message = await self._events.get()
        if self._events.empty():
            self._resume_reading()
        return message

    def _resume_reading(self) -> None:
        if not self._is_reading:
            self._is_reading = True
            self._transport.resume_reading()

    def _put_disconnect(self, code: int, reason: str = "") -> None:
        self._events.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})

    # Sending

    def _flush(self, *, are_pongs: bool = False) -> None:
        """Writes websockets' pending output, and closes the connection if it ends with an end of
        stream.

        Skips pongs for a client that does not read, as RFC 6455 (5.5.3) allows.
        """
        output = self._conn.data_to_send()
        is_end = b"" in output
        if is_end or not are_pongs or self._writable.is_set():
            self._transport.write(b"".join(output))
        if is_end:
            close = self._conn.close_rcvd or self._conn.close_sent
            if close is None:
                self._put_disconnect(CloseCode.ABNORMAL_CLOSURE)
            else:
                self._put_disconnect(close.code, close.reason)
            self._set_timer(None)
            self._transport.close()

    def _fail(self, code: CloseCode, reason: str = "") -> None:
        self._has_failed = True
        self._conn.fail(code, reason)

    async def _send(self, message: Message) -> None:
        """Raises `ClientGoneError`."""
        await self._writable.wait()
        if self._transport.is_closing() or self._has_closed:
            raise ClientGoneError
        try:
            match message["type"]:
                case "websocket.send":
                    if message.get("bytes") is not None:
                        self._conn.send_binary(message["bytes"])
                    else:
                        self._conn.send_text(message["text"].encode())
                    self._flush()
                case "websocket.accept":
                    self._accept(message)
                case "websocket.close" if self._response is not None:
                    self._refuse(self._conn.reject(http.HTTPStatus.FORBIDDEN, ""))
                case "websocket.close":
                    self._close(message.get("code", CloseCode.NORMAL_CLOSURE), message.get("reason") or "")
                case "websocket.http.response.start":
                    self._refusal = message
                case "websocket.http.response.body":
                    self._refusal_body += message.get("body", b"")
                    if not message.get("more_body", False):
                        self._refuse(self._rendered_refusal())
        except InvalidState:
            raise ClientGoneError from None

    def _accept(self, message: Message) -> None:
        response, self._response = self._response, None
        assert response is not None
        del response.headers["Date"]  # uvicorn adds its own
        response.headers.update(
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in (*self._server_state.default_headers, *message.get("headers", ()))
        )
        if message.get("subprotocol"):
            response.headers["Sec-WebSocket-Protocol"] = message["subprotocol"]
        self._conn.send_response(response)
        self._flush()
        self._schedule_ping()

    def _close(self, code: int, reason: str) -> None:
        self._conn.send_close(code, reason)
        self._put_disconnect(code, reason)
        self._has_closed = True
        self._ping = b""
        self._set_timer(self._loop.call_later(_CLOSE_TIMEOUT_S, self._transport.close))
        self._flush()
        self._resume_reading()  # for the client's close

    def _refuse(self, response: Response) -> None:
        self._response = None
        self._has_closed = True
        self._conn.send_response(response)
        self._flush()

    def _refuse_unanswered(self) -> None:
        if self._response is not None and not self._transport.is_closing():
            self._refuse(self._conn.reject(http.HTTPStatus.INTERNAL_SERVER_ERROR, ""))

    def _rendered_refusal(self) -> Response:
        assert self._refusal is not None
        status = http.HTTPStatus(self._refusal["status"])
        headers = Headers(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in self._refusal["headers"]
        )
        headers.setdefault("Connection", "close")
        headers.setdefault("Content-Length", str(len(self._refusal_body)))
        return Response(status.value, status.phrase, headers, self._refusal_body)

    # Keepalive

    def _set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def _schedule_ping(self) -> None:
        self._ping = b""
        if self._config.ws_ping_interval:
            self._set_timer(self._loop.call_later(self._config.ws_ping_interval, self._send_ping))

    def _send_ping(self) -> None:
        if self._transport.is_closing() or self._conn.state is not State.OPEN:
            return
        self._ping = os.urandom(4)
        self._conn.send_ping(self._ping)
        self._flush()
        if self._config.ws_ping_timeout is None:
            self._schedule_ping()
        else:
            self._set_timer(self._loop.call_later(self._config.ws_ping_timeout, self._on_ping_timeout))

    def _on_ping_timeout(self) -> None:
        self._fail(CloseCode.INTERNAL_ERROR, "keepalive ping timeout")
        self._flush()

    # The application

    async def _run(self, scope: Scope) -> None:
        try:
            await self._config.loaded_app(scope, self._receive, self._send)
        except ClientGoneError:
            pass
        except Exception:
            logger.exception("a WebSocket session failed")
        finally:
            self._refuse_unanswered()
            if not self._has_closed:
                self._transport.close()

    def _scope(self, request: Request) -> Scope:
        raw_path, _, query = request.path.encode("ascii", "surrogateescape").partition(b"?")
        is_tls = self._transport.get_extra_info("sslcontext") is not None
        subprotocols = ",".join(request.headers.get_all("Sec-WebSocket-Protocol"))
        return {
            "type": "websocket",
            "asgi": {"version": self._config.asgi_version, "spec_version": "2.4"},
            "http_version": "1.1",
            "scheme": "wss" if is_tls else "ws",
            "server": _address(self._transport.get_extra_info("sockname")),
            "client": _address(self._transport.get_extra_info("peername")),
            "root_path": self._config.root_path,
            "path": self._config.root_path + unquote(raw_path.decode("ascii", "replace")),
            "raw_path": self._config.root_path.encode() + raw_path,
            "query_string": query,
            "headers": [(name.encode(), _header_bytes(value)) for name, value in request.headers.raw_items()],
            "subprotocols": [name.strip() for name in subprotocols.split(",") if name.strip()],
            "state": self._app_state.copy(),
            "extensions": {"websocket.http.response": {}},
        }


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


def _address(found: object) -> tuple[str, int] | None:
    """Host and port; None for a Unix socket."""
    return (str(found[0]), int(found[1])) if isinstance(found, tuple) else None


def _header_bytes(value: str) -> bytes:
    """websockets decodes headers as Latin-1, or before release 17 as ASCII with escapes for other bytes."""
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError:
        return value.encode("ascii", "surrogateescape")
