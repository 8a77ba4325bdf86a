"""Which web sites may use the API from a browser: none but the server's own, unless the operator says so."""

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import Response
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from omni_server.api.errors import error_response
from omni_server.errors import OriginNotAllowedError

EXPOSED_HEADERS = ("x-request-id", "openai-processing-ms", "retry-after")
"""Response headers that scripts may read."""


@dataclass(frozen=True)
class CorsRules:
    """Names and meanings are those of `vllm serve`."""

    allowed_origins: tuple[str, ...] = ()
    """As in `https://chat.example`; `*` is every site. Empty switches CORS off."""
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False


class CorsHeaders(CORSMiddleware):
    """Starlette's, with refused preflights in the envelope that all errors have."""

    def __init__(self, app: ASGIApp, rules: CorsRules) -> None:
        super().__init__(
            app,
            allow_origins=rules.allowed_origins,
            allow_methods=rules.allowed_methods,
            allow_headers=rules.allowed_headers,
            allow_credentials=rules.allow_credentials,
            expose_headers=EXPOSED_HEADERS,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        refusal = OriginNotAllowedError(f"{bytes(response.body).decode()}.")
        refusal.status = response.status_code
        kept = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        return error_response(refusal, kept)


class WebSocketOriginMiddleware:
    """403 for WebSockets that a browser opens on behalf of another web site.

    CORS does not cover WebSockets: without this, any page that somebody has open could talk to a server on their
    machine that needs no key. Programs that are no browsers send no `Origin`.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str]) -> None:
        self.app = app
        self._allowed = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and not self._is_allowed(Headers(scope=scope)):
            error = OriginNotAllowedError("This server does not accept WebSockets of that web site.")
            await error_response(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin is None or "*" in self._allowed or origin in self._allowed:
            return True
        host = headers.get("host", "").lower()
        return host != "" and origin.lower().partition("://")[2] == host
