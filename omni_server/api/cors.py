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


class CrossSiteMiddleware:
    """403 for requests that a browser sends on behalf of another web site, WebSockets included.

    CORS keeps other sites from reading answers, but not from sending requests that need no preflight (a form with a
    file, for example) or from opening WebSockets: without this, any page that somebody has open could make a server on
    their machine that needs no key work for it. Links from other sites still work. Programs that are not browsers send
    neither `Sec-Fetch-Site` nor `Origin`.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str]) -> None:
        """`*` among the origins lets every site in."""
        self.app = app
        self._allowed = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not self._is_allowed(scope, Headers(scope=scope)):
            error = OriginNotAllowedError(
                "This server takes no requests of other web sites, unless they are among its --allowed-origins."
            )
            await error_response(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_allowed(self, scope: Scope, headers: Headers) -> bool:
        site = headers.get("sec-fetch-site")  # no script can set it; browsers leave it out on plain HTTP
        origin = headers.get("origin")
        if "*" in self._allowed or origin in self._allowed or site in ("same-origin", "none"):
            return True
        if site is None:
            return origin is None or _is_own(origin, headers)
        return origin is None and _is_link(scope, headers)


def _is_own(origin: str, headers: Headers) -> bool:
    host = headers.get("host", "").lower()
    return host != "" and origin.lower().partition("://")[2] == host


def _is_link(scope: Scope, headers: Headers) -> bool:
    """The browser opens the URL in a window, where the site that it came from cannot see it."""
    return (
        scope["type"] == "http"
        and scope["method"] in ("GET", "HEAD")
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )
