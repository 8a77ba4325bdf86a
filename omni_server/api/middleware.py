"""Middleware for every request, in plain ASGI: streams and disconnects pass through unchanged."""

import logging
import re
import time
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_server.api.access_log import log_request, shown_path
from omni_server.api.errors import CLIENT_CLOSED_REQUEST, error_response, unexpected_error
from omni_server.api.request_record import (
    RequestRecord,
    begin_request,
    current_request,
    new_request_id,
    path_of,
)
from omni_server.api.server_metrics import ServerMetrics

if TYPE_CHECKING:
    from omni_server.api.otel import OtelTracer

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_RETRY_COUNT = re.compile(r"[0-9]{1,3}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_STARTS = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
_SWITCHING_PROTOCOLS = 101
_FORBIDDEN = 403
_NO_ROUTE = "none"


class RequestIdMiddleware:
    """Adds `x-request-id` to every response: the caller's if it is well-formed, else a new one. Responses
    that are not streamed also report their duration in `openai-processing-ms`.

    As the outermost middleware it sees every response. It creates the request's `RequestRecord`, begins
    and ends its trace span, and at the end counts the request and, with `is_logged`, logs it.
    """

    def __init__(
        self, app: ASGIApp, metrics: ServerMetrics, *, is_logged: bool, tracer: "OtelTracer | None"
    ) -> None:
        """A `tracer` traces requests under `/v1/`."""
        self.app = app
        self._metrics = metrics
        self._is_logged = is_logged
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        record = _record(scope, is_logged=self._is_logged)
        if self._tracer is not None and path_of(scope).startswith("/v1/"):
            record.span = self._tracer.began(scope, record.request_id)
        begin_request(record)
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] in _STARTS:
                record.response_begins()
                status = message.get("status", _SWITCHING_PROTOCOLS)
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.request_id
                if "content-length" in headers:  # not a stream, which begins long before it ends
                    headers["openai-processing-ms"] = str(round(1000 * (time.perf_counter() - record.began)))
            elif message["type"] == "websocket.close" and status is None:
                status = _FORBIDDEN  # web servers respond with this before the session has begun
            await send(message)

        if record.is_websocket:
            self._metrics.websockets.inc()
        try:
            await self.app(scope, receive, send_with_id)
        finally:
            self._ended(scope, record, CLIENT_CLOSED_REQUEST if status is None else status)

    def _ended(self, scope: Scope, record: RequestRecord, status: int) -> None:
        if record.is_websocket:
            self._metrics.websockets.dec()
        found = scope.get("route")
        template: str | None = None if found is None else found.path  # e.g. `/v1/models/{model_id:path}`
        route = _NO_ROUTE if template is None else template
        method = "WEBSOCKET" if record.is_websocket else scope["method"]
        seconds = time.perf_counter() - record.began
        known_method = method if record.is_websocket or method in _METHODS else "other"
        self._metrics.http_ended(route, known_method, status, seconds, is_retry=record.num_retries > 0)
        shown = shown_path(path_of(scope)) if template is None else template
        if record.span is not None:
            record.span.ended(record, method=known_method, route=template, status=status)
        client = scope["client"][0] if scope.get("client") else None
        log_request(f"{shown_path(method)} {shown}", route, record, status=status, client=client)


class UnexpectedErrorMiddleware:
    """Turns an unexpected exception into a 500.

    Starlette's own handler is outside of all middleware: its response would have neither a request id
    nor CORS headers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send)
        except Exception:
            record = current_request()
            assert record is not None
            if record.has_response_begun:
                raise  # the web server logs it and disconnects
            logger.exception("request %s failed", record.request_id)
            await error_response(unexpected_error())(scope, receive, send)


def _record(scope: Scope, *, is_logged: bool) -> RequestRecord:
    headers = Headers(scope=scope)
    given = headers.get("x-request-id", "")
    retries = headers.get("x-stainless-retry-count", "")
    return RequestRecord(
        request_id=given if _REQUEST_ID.fullmatch(given) else new_request_id(),
        is_websocket=scope["type"] == "websocket",
        is_logged=is_logged,
        num_retries=int(retries) if _RETRY_COUNT.fullmatch(retries) else 0,
    )
