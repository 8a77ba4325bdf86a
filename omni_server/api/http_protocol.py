"""uvicorn's HTTP connections, with limits on everything but the request body."""

import asyncio
import fcntl
import http
import logging
import termios
import time
from array import array
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from omni_server.api.access_log import log_request
from omni_server.api.config import ApiConfig
from omni_server.api.errors import error_response
from omni_server.api.request_record import RequestRecord, begin_request, new_request_id
from omni_server.api.server_metrics import ServerMetrics
from omni_server.errors import (
    HeadersTooLargeError,
    InvalidRequestError,
    OmniError,
    UploadTimeoutError,
    UrlTooLongError,
)

logger = logging.getLogger(__name__)

_FIELD_OVERHEAD = 4
"""Bytes: the colon, the space and the line end of a header field."""
_REQUEST_LINE_OVERHEAD = 64
"""Bytes of a request line without the URL, rounded up."""
_LINGER_S = 10.0
"""How long a client may continue to send its body after an early response. The server drops the data:
closing immediately would reset the connection, and the client might lose the response."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Refuses oversized, slow and malformed request heads with the API's error envelope.

    uvicorn has no such limits: its parser buffers a header field until it ends, and a connection stays open
    for as long as the client takes to complete a head. Trailers of a chunked body count against the same
    limits as headers and are dropped.
    """

    api_config: ApiConfig
    metrics: ServerMetrics

    url: bytes = b""
    _error: OmniError | None = None
    """Why a parser callback stopped the parser."""
    _is_head: bool = True
    """The next bytes belong to a request line or headers."""
    _num_fields: int = 0
    _num_field_bytes: int = 0
    _num_pending: int = 0
    """Bytes read since the last head was completed or body data arrived, which the parser may
    still hold."""
    _num_new: int = 0
    """Bytes of the current read that may have to be added to `_num_pending`."""
    _head_deadline: asyncio.TimerHandle | None = None
    _end: asyncio.TimerHandle | None = None
    _is_discarding: bool = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_deadline()
        self._stop_lingering()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        if self.cycle is not None:
            # The wrapper refers to this protocol: avoid a reference cycle.
            self.cycle.transport = self.transport

    def data_received(self, data: bytes) -> None:
        if self._is_discarding:
            return
        self._num_new = len(data)
        super().data_received(data)
        if self._is_discarding or self.transport.is_closing():
            return
        self._num_pending += self._num_new
        if self._num_pending > self.api_config.max_header_bytes + len(self.url) + _REQUEST_LINE_OVERHEAD:
            self._refuse(self._too_large())
        elif self._is_head and self._num_pending and self._head_deadline is None:
            self._start_head_deadline()

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        self._num_fields = self._num_field_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self.api_config.max_url_bytes:
            self._stop(
                UrlTooLongError(f"The URL is longer than the {self.api_config.max_url_bytes} bytes accepted.")
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_fields += 1
        self._num_field_bytes += len(name) + len(value) + _FIELD_OVERHEAD
        if self._num_fields > self.api_config.max_header_fields:
            self._stop(
                HeadersTooLargeError(
                    f"The request has more than the {self.api_config.max_header_fields} "
                    "header fields accepted."
                )
            )
        if self._num_field_bytes > self.api_config.max_header_bytes:
            self._stop(self._too_large())
        if self._is_head:  # not a trailer, which would change the headers of an admitted request
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and self.parser.get_http_version() == "1.1"):
            self._stop(
                InvalidRequestError(
                    "An HTTP/1.1 request needs exactly one Host header.",
                    param="Host",
                    code="invalid_host_header",
                )
            )
        self._unset_keepalive_if_required()  # the previous request may have set it in the same read
        super().on_headers_complete()
        self._is_head = False
        self._nothing_pending()
        self._stop_head_deadline()
        if self.cycle is not None:  # None if a connection begins with a WebSocket upgrade
            self.cycle.transport = _ResponseTransport(self, self.transport)

    def on_body(self, body: bytes) -> None:
        self._nothing_pending()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_head = True
        self._nothing_pending()
        super().on_message_complete()
        if self._end is not None:  # answered before its body arrived
            self._stop_lingering()
            self._wait_idle()

    # Answers

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this when its parser fails."""
        unreadable = InvalidRequestError("This is not a valid HTTP request.", code="invalid_http_request")
        self._refuse(self._error or unreadable)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body and not self.transport.is_closing():
            self._linger()

    def end(self) -> None:
        """Closes the connection; lingers first if the request has not fully arrived."""
        if self.cycle.response_complete and self.cycle.more_body:
            self._discard()
        else:
            self.transport.close()

    def _stop(self, error: OmniError) -> None:
        """Stops the parser from within a callback; uvicorn then calls `send_400_response`."""
        self._error = error
        raise error

    def _too_large(self) -> OmniError:
        return HeadersTooLargeError(
            f"The request's headers are larger than the {self.api_config.max_header_bytes} bytes accepted."
        )

    def _refuse(self, error: OmniError) -> None:
        if self.pipeline or (self._is_answering() and self.cycle.response_started):
            self.transport.close()  # a second response would look like part of the first
            return
        if self._is_answering():  # reading the body: report a disconnect to the application
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        record = RequestRecord(new_request_id(), is_logged=self.api_config.access_log)
        begin_request(record)
        response = error_response(error, {"x-request-id": record.request_id, "connection": "close"})
        phrase = http.HTTPStatus(error.status).phrase
        head = [f"HTTP/1.1 {error.status} {phrase}".encode()]
        head += [
            name + b": " + value
            for name, value in (*self.server_state.default_headers, *response.raw_headers)
        ]
        self.transport.write(b"\r\n".join([*head, b"", bytes(response.body)]))
        self.metrics.http_ended(
            "none", "other", error.status, time.perf_counter() - record.began, is_retry=False
        )
        client = self.client[0] if self.client else None
        log_request("unreadable request", "none", record, status=error.status, client=client)
        self._discard()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # The connection

    def _nothing_pending(self) -> None:
        self._num_pending = self._num_new = 0

    def _wait_idle(self) -> None:
        """As uvicorn after each response."""
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _start_head_deadline(self) -> None:
        self._head_deadline = self.loop.call_later(self.api_config.header_timeout_s, self._on_head_deadline)

    def _stop_head_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _on_head_deadline(self) -> None:
        if self._is_answering():  # an earlier request on this connection, with reading paused
            self._start_head_deadline()
            return
        self._refuse(
            UploadTimeoutError(
                f"The headers did not arrive within the {self.api_config.header_timeout_s:g} s "
                "that this server waits.",
                code="header_timeout",
            )
        )

    def _discard(self) -> None:
        """Ignores further input and signals the end of the connection to the client."""
        self._is_discarding = True
        self.parser = None  # type: ignore[assignment]  # frees the oversized data, as uvicorn does
        self._error = None  # its traceback holds it
        self._stop_head_deadline()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger()

    def _linger(self) -> None:
        if self._end is None:
            self._end = self.loop.call_later(_LINGER_S, self.transport.abort)

    def _stop_lingering(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None


class _ResponseTransport(asyncio.Transport):
    """The transport for uvicorn's response writer; `close` goes through the protocol's `end`."""

    def __init__(self, protocol: BoundedHttpProtocol, transport: asyncio.Transport) -> None:
        self._protocol = protocol
        self._transport = transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._protocol.end()


class StallWatch(asyncio.Protocol):
    """Mixin for uvicorn's HTTP protocol that disconnects stalled clients.

    With more than 64 KiB unread by the client, the transport pauses writing, and uvicorn blocks the
    application meanwhile: a request could hold its slot forever. No bytes are added during a pause, so if the
    backlog does not shrink for `stall_timeout_s`, the client reads nothing. The connection is then aborted
    and the application sees a disconnect. Slow readers are served to the end.
    """

    stall_timeout_s: float
    """Clients are disconnected after once to twice this."""
    _transport: asyncio.Transport
    _check: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not subclass it
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        self._check = loop.call_later(self.stall_timeout_s, self._check_progress, self._num_left())

    def _stop_watching(self) -> None:
        if self._check is not None:
            self._check.cancel()
            self._check = None

    def _num_left(self) -> int:
        """Unsent bytes, including those in the kernel's buffer. It may hold megabytes, and accepts no
        more until much of it has been sent, which takes a client that plays as it reads a while."""
        queued = array("i", [0])
        fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self._transport.get_write_buffer_size() + queued[0]

    def _check_progress(self, num_before: int) -> None:
        if self._num_left() < num_before:
            self._watch()
            return
        client = self._transport.get_extra_info("peername")
        logger.warning("the client %s took nothing for %g s and is cut off", client, self.stall_timeout_s)
        self._transport.abort()


def http_protocol(config: ApiConfig, metrics: ServerMetrics) -> type[asyncio.Protocol]:
    """The HTTP protocol class for uvicorn."""
    return type(
        "HttpProtocol",
        (StallWatch, BoundedHttpProtocol),
        {"stall_timeout_s": config.http_send_timeout_s, "api_config": config, "metrics": metrics},
    )
