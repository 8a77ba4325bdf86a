"""Access control: checks the API key, the `Host` and the `Origin` of each request.

All checks run before any of the body is read, and apply to WebSockets as well.
"""

import hashlib
import hmac
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from fastapi import Response
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from omni_server.api.config import ApiConfig, CorsRules
from omni_server.api.errors import error_response
from omni_server.api.request_record import current_request, path_of
from omni_server.errors import (
    AuthenticationError,
    ConfigError,
    HostNotAllowedError,
    OmniError,
    OriginNotAllowedError,
)

PROBES = frozenset({"/health", "/healthz", "/ready", "/readyz", "/live", "/livez", "/ping", "/version"})
METRICS = frozenset({"/metrics", "/load"})
VOICE_LISTS = frozenset({"/v1/audio/voices", "/v1/audio/models"})
"""They contain only names, and Open WebUI requests them without its key."""
WEB_PAGE = frozenset({"/", "/favicon.ico"})
"""The page is the same for all users; its requests to the API need a key."""
WEB_PAGE_FOLDERS = ("/web/",)

EXPOSED_HEADERS = ("x-request-id", "openai-processing-ms", "retry-after")
"""Response headers that scripts on other web sites may read."""

_WEBSOCKET_KEY_PREFIX = "openai-insecure-api-key."
"""Browsers cannot set headers on a WebSocket, so OpenAI's clients send the key as a
subprotocol."""


class AccessMiddleware:
    """Refuses requests without a key if the server has keys, and those from other web sites if it has none:
    browsers send no key on behalf of another web site. `CorsHeaders` answers CORS preflights first."""

    def __init__(self, app: ASGIApp, config: ApiConfig, keys: "ApiKeys") -> None:
        self.app = app
        self._config = config
        self._keys = keys
        self._origins = frozenset(config.cors.allowed_origins)
        """`*` allows every site and every host."""
        names = {_without_port(origin.partition("://")[2]) for origin in self._origins}
        self._host_names = frozenset((names | {"localhost"}) - {""})
        # Without keys, all programs on this machine have access, including browsers and, if unchecked,
        # web pages.
        self._is_local_only = config.uds is None and is_loopback(config.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            error = self._key_refusal(scope) if self._keys else self._web_site_refusal(scope)
            if error is not None:
                await error_response(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _key_refusal(self, scope: Scope) -> OmniError | None:
        """Returns a 401 if the request lacks a needed key. Stores the caller's name in the
        `RequestRecord`."""
        given = _given_key(scope)
        name = None if given is None else self._keys.name_of(given)
        record = current_request()
        if name is not None and record is not None:
            record.caller = name
        is_open = scope["type"] == "http" and not needs_key(self._config, path_of(scope), scope["method"])
        if name is not None or is_open:
            return None
        if given is None:
            return AuthenticationError(
                "You didn't provide an API key. "
                "Send it in an Authorization header: 'Authorization: Bearer YOUR_KEY'."
            )
        return AuthenticationError("Incorrect API key provided.")

    def _web_site_refusal(self, scope: Scope) -> OmniError | None:
        if "*" in self._origins:
            return None
        headers = Headers(scope=scope)
        if self._is_local_only and not all(self._is_known(host) for host in headers.getlist("host")):
            return HostNotAllowedError(
                "This server accepts requests of its own machine only: "
                "the name in the Host header is not one of its names, and its --allowed-origins allow no other."
            )
        if not self._is_allowed(scope, headers):
            return OriginNotAllowedError(
                "This server takes no requests of other web sites, unless they are among its "
                "--allowed-origins."
            )
        return None

    def _is_known(self, host: str) -> bool:
        """Whether `host` is one of the server's known names.

        A web page can make its own host name resolve to 127.0.0.1 (DNS rebinding). To the browser, the server
        is then part of that web site: neither CORS nor comparing `Origin` with `Host` prevents the page from
        reading answers. But it cannot change the name in `Host`. Addresses belong to no web site, and
        requests without `Host` do not come from a browser.
        """
        name = _without_port(host)
        return name in self._host_names or _is_ip_address(name)

    def _is_allowed(self, scope: Scope, headers: Headers) -> bool:
        """False for requests that a browser sends on behalf of another web site, including WebSockets.

        CORS prevents other sites from reading answers, but not from sending requests that need no preflight
        (such as a form with a file) or from opening WebSockets: without this check, any page in a browser
        could use a server without keys on the same machine. Links from other sites still work. Programs
        other than browsers send neither `Sec-Fetch-Site` nor `Origin`.
        """
        site = headers.get("sec-fetch-site")  # scripts cannot set it; browsers omit it on plain HTTP
        origin = headers.get("origin")
        if origin in self._origins or site in ("same-origin", "none"):
            return True
        if site is None:
            return origin is None or _is_own(origin, headers)
        return origin is None and _is_link(scope, headers)


class ApiKeys:
    """The accepted API keys; without any, the server is open to all callers.

    Their names are `key-1`, `key-2` and so on, in the given order. Raises `ConfigError` for an empty key,
    as an unset variable in a script gives.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        for key in keys:
            if not key or not key.isprintable() or " " in key:
                raise ConfigError("an API key is empty, or holds spaces or control characters")
        self._digests = [
            (f"key-{number}", _digest(key.encode())) for number, key in enumerate(dict.fromkeys(keys), 1)
        ]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def name_of(self, key: bytes) -> str | None:
        """The name of `key`, or None if it is unknown. Runs in constant time."""
        given = _digest(key)
        found = None
        for name, digest in self._digests:
            if hmac.compare_digest(given, digest):
                found = name
        return found


def needs_key(config: ApiConfig, path: str, method: str) -> bool:
    """Whether a request needs a key if the server has keys. Browsers send no key with OPTIONS, and no route
    handles OPTIONS."""
    if method == "OPTIONS" or path in PROBES:
        return False
    is_open = (
        path in WEB_PAGE
        or path.startswith(WEB_PAGE_FOLDERS)
        or (path in METRICS and not config.metrics_need_key)
        or (path in VOICE_LISTS and config.public_voice_lists)
    )
    return not (is_open and method in ("GET", "HEAD"))


class CorsHeaders(CORSMiddleware):
    """Starlette's middleware; refuses preflights with the API's error envelope."""

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


def read_key_file(path: Path) -> tuple[str, ...]:
    """Reads one key per line and skips empty lines and # comments. Raises `ConfigError`."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error}") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{path} holds no API key: one on each line is expected")
    return keys


def is_loopback(host: str) -> bool:
    """Whether a server on `host` is reachable only from its own machine."""
    return host == "localhost" or (_is_ip_address(host) and ip_address(host).is_loopback)


def _given_key(scope: Scope) -> bytes | None:
    scheme, _, key = Headers(scope=scope).get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer":
        return key.strip().encode("latin-1")
    if scope["type"] == "websocket":
        for protocol in scope["subprotocols"]:
            if protocol.startswith(_WEBSOCKET_KEY_PREFIX):
                return str(protocol)[len(_WEBSOCKET_KEY_PREFIX) :].encode()
    return None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _is_own(origin: str, headers: Headers) -> bool:
    host = headers.get("host", "").lower()
    return host != "" and origin.lower().partition("://")[2] == host


def _is_link(scope: Scope, headers: Headers) -> bool:
    """Whether the browser opens the URL in a window, which the linking site cannot read."""
    return (
        scope["type"] == "http"
        and scope["method"] in ("GET", "HEAD")
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )


def _without_port(host: str) -> str:
    """E.g. `localhost:8091` or `[::1]:8091`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _is_ip_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
