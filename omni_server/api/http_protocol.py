"""uvicorn's HTTP connections, with deadlines and the API's error envelope."""

import asyncio
import http
import logging
import sys

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from omni_server.api.access_log import log_request
from omni_server.api.config import ApiConfig
from omni_server.api.errors import error_response
from omni_server.api.limits import LINGER_S, headers_too_large, url_too_long
from omni_server.api.request_record import RequestRecord, begin_request, new_request_id
from omni_server.api.server_metrics import ServerMetrics
from omni_server.errors import InvalidRequestError, OmniError, UploadTimeoutError

logger = logging.getLogger(__name__)

_READ_BYTES = 16 * 1024
"""Per read. h11 takes 3 ms for a KiB of one-byte chunks, and other connections wait meanwhile."""


class HttpProtocol(H11Protocol, asyncio.BufferedProtocol):
    """Refuses what is not a request, or takes too long to become one, and closes connections without any.

    h11 bounds unfinished heads, trailers and chunk extensions (`h11_max_incomplete_event_size`);
    `HeadLimitMiddleware` bounds complete heads.
    """

    _buffer = memoryview(bytearray(_READ_BYTES))  # of all connections: it is emptied as soon as it is filled

    def __init__(
        self, config: Config, server_state: ServerState, api_config: ApiConfig, metrics: ServerMetrics
    ) -> None:
        super().__init__(config, server_state, {})
        self._api_config = api_config
        self._metrics = metrics
        self._deadline: asyncio.TimerHandle | None = None
        """Of the head that arrives, or of the client after a refusal."""
        self._is_refused = False
        self.idle_since = 0.0
        """Time of the event loop."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered. An answer that began before the body had arrived is an
        error, and all of it has been sent."""
        return (
            self.cycle is None
            or self.cycle.response_complete
            or self.cycle.disconnected
            or (self.cycle.response_started and self.conn.their_state is h11.SEND_BODY)
        )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.idle_since = self.loop.time()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(None)
        if isinstance(exc, TimeoutError):  # TCP_USER_TIMEOUT
            timeout_s = self._api_config.http_send_timeout_s
            logger.warning("the client %s took nothing for %g s and is cut off", self.client, timeout_s)
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self._buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            if self._deadline is None:
                timeout_s = self._api_config.header_timeout_s
                self._set_deadline(self.loop.call_later(timeout_s, self._on_head_deadline))
        elif self.conn.their_state is not h11.ERROR:  # `_refuse` has set another one
            self._set_deadline(None)

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this while it handles an error of h11."""
        error = sys.exception()
        assert isinstance(error, h11.RemoteProtocolError)
        if error.error_status_hint == http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            is_url = b"\n" not in self.conn.trailing_data[0] and self.conn.our_state is h11.IDLE
            self._refuse(url_too_long(self._api_config) if is_url else headers_too_large(self._api_config))
        else:
            message = f"This is not a valid HTTP request: {error}."
            self._refuse(InvalidRequestError(message, code="invalid_http_request"))

    def on_response_complete(self) -> None:
        is_incomplete = self.conn.their_state is h11.SEND_BODY  # though `LingerMiddleware` has waited
        self.idle_since = self.loop.time()
        super().on_response_complete()
        if is_incomplete:
            self.transport.close()

    def _on_head_deadline(self) -> None:
        timeout_s = self._api_config.header_timeout_s
        message = f"The headers did not arrive within the {timeout_s:g} s that this server waits."
        self._refuse(UploadTimeoutError(message, code="header_timeout"))

    def _refuse(self, error: OmniError) -> None:
        self._is_refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            if not self.cycle.more_body:
                return  # the request is complete, and what follows it does not change its answer
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()  # a second response would look like part of the first
                return
        record = RequestRecord(new_request_id(), is_logged=self._api_config.access_log)
        begin_request(record)
        response = error_response(error, {"x-request-id": record.request_id, "connection": "close"})
        headers = [*self.server_state.default_headers, *response.raw_headers]
        head = h11.Response(status_code=error.status, headers=headers)
        events = (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self._metrics.http_ended("none", "other", error.status, 0.0, is_retry=False)
        client = self.client[0] if self.client else None
        log_request("unreadable request", "none", record, status=error.status, client=client)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._set_deadline(self.loop.call_later(LINGER_S, self.transport.abort))

    def _set_deadline(self, timer: asyncio.TimerHandle | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = timer
