"""Converts failures to HTTP responses in OpenAI's error envelope."""

from collections.abc import Mapping

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from omni_server.api.request_record import current_request
from omni_server.errors import AuthenticationError, InvalidRequestError, OmniError, StageDownError

CLIENT_CLOSED_REQUEST = 499
"""nginx's status, for the log only: the client has disconnected."""

_SLOW_RETRY_CODES = ("model_not_ready", "engine_dead", "server_shutting_down")
_SLOW_RETRY_AFTER_S = 5
_MAX_MESSAGE = 1000


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(BaseModel):
    error: ErrorBody


def envelope(error: OmniError) -> ErrorEnvelope:
    """`{"error": {"message", "type", "param", "code"}}`."""
    message = error.message if len(error.message) <= _MAX_MESSAGE else error.message[:_MAX_MESSAGE] + "..."
    return ErrorEnvelope(
        error=ErrorBody(message=message, type=error.type, param=error.param, code=error.code)
    )


def logged(error: OmniError) -> str:
    """Formats an error for the log: the code and, for server failures, the escaped message. Other messages
    may contain what the client sent and are omitted."""
    code = error.code or error.type
    return code if error.status < 500 else f"{code} {error.message!a}"


def error_response(error: OmniError, headers: Mapping[str, str] | None = None) -> Response:
    """The response to a failed request, with headers that control whether and when OpenAI's clients
    retry."""
    all_headers = dict(headers) if headers is not None else {}
    record = current_request()
    if record is not None:
        record.error = error
    if isinstance(error, AuthenticationError):
        all_headers["www-authenticate"] = 'Bearer realm="omni-server"'
    if error.status in (429, 503):
        is_slow = isinstance(error, StageDownError) or error.code in _SLOW_RETRY_CODES
        all_headers.setdefault("retry-after", str(_SLOW_RETRY_AFTER_S if is_slow else 1))
    elif error.status >= 500:
        # Clients would retry twice by default, but a request that failed or timed out once is likely to do
        # so again.
        all_headers["x-should-retry"] = "false"
    if error.status in (408, 413, 414, 431):  # do not read the rest of the request
        all_headers["connection"] = "close"
    return Response(
        envelope(error).model_dump_json(),
        status_code=error.status,
        headers=all_headers,
        media_type="application/json",
    )


def unexpected_error() -> OmniError:
    """The error that hides an unexpected exception from the client."""
    return OmniError("The server had an error while processing your request.")


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(OmniError, _on_omni_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_client_disconnect)
    not_found = app.router.default

    async def no_route(scope: Scope, receive: Receive, send: Send) -> None:
        """Replaces Starlette's empty 403 for WebSockets at unknown URLs."""
        if scope["type"] != "websocket":
            await not_found(scope, receive, send)
            return
        error = InvalidRequestError(f"Invalid URL (WebSocket {scope['path'][:200]}).", code="unknown_url")
        error.status = 404
        await error_response(error)(scope, receive, send)

    app.router.default = no_route


async def _on_omni_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OmniError)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Router errors: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    target = f"{request.method} {request.url.path}"[:200]
    match error.status_code:
        case 404:
            failure = InvalidRequestError(f"Invalid URL ({target}).", code="unknown_url")
        case 405:
            failure = InvalidRequestError(f"Method not allowed ({target}).", code="method_not_allowed")
        case _:
            failure = InvalidRequestError(str(error.detail))
    failure.status = error.status_code
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(sorted(_methods_of(request)))
    return error_response(failure, headers)


def _methods_of(request: Request) -> set[str]:
    """All methods of the URL; the router reports only those of the first matching route."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in matching for method in route.methods or ()}


async def _on_client_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
