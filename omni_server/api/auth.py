"""API keys: who may use the server, checked before anything of a request is read."""

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from omni_server.api.errors import error_response
from omni_server.api.request_record import current_request, path_of
from omni_server.errors import AuthenticationError, ConfigError

PROBES = frozenset({"/health", "/healthz", "/ready", "/readyz", "/live", "/livez", "/ping", "/version"})
METRICS = frozenset({"/metrics", "/load"})
VOICE_LISTS = frozenset({"/v1/audio/voices", "/v1/audio/models"})
"""They tell names only, and Open WebUI asks for them without its key."""
WEB_PAGE = frozenset({"/", "/favicon.ico"})
"""The page is the same for everybody; what it sends to the API needs a key."""
WEB_PAGE_FOLDERS = ("/web/",)

_WEBSOCKET_KEY_PREFIX = "openai-insecure-api-key."
"""Browsers cannot set headers on a WebSocket, so OpenAI's clients put the key among the subprotocols there."""

_HEADERS = {"www-authenticate": 'Bearer realm="omni-server"'}


class ApiKeys:
    """The keys that open the server; without any it is open to everybody.

    Their names are `key-1`, `key-2` and so on, in the order given. Raises `ConfigError` for an empty key, which an
    unset variable in a script would give.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        for key in keys:
            if not key or not key.isprintable() or " " in key:
                raise ConfigError("an API key is empty, or holds spaces or control characters")
        self._digests = [(f"key-{number}", _digest(key.encode())) for number, key in enumerate(dict.fromkeys(keys), 1)]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def name_of(self, key: bytes) -> str | None:
        """The name of `key`, None if it is unknown; takes the same time for all."""
        given = _digest(key)
        found = None
        for name, digest in self._digests:
            if hmac.compare_digest(given, digest):
                found = name
        return found


class AuthMiddleware:
    """401 for whatever is not open to everybody and has no key, WebSockets included.

    The caller's name goes into the request's `RequestRecord`. CORS preflights must be answered outside of this.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: "OpenPaths") -> None:
        self.app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and self._keys:
            given = _given_key(scope)
            name = None if given is None else self._keys.name_of(given)
            record = current_request()
            if name is not None and record is not None:
                record.caller = name
            is_open = scope["type"] == "http" and not self._open_paths.exclude(path_of(scope), scope["method"])
            if name is None and not is_open:
                await error_response(_refusal(is_missing=given is None), _HEADERS)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class OpenPaths:
    """What is served to everybody, also where the server has keys."""

    def __init__(self, *, metrics_need_key: bool, public_voice_lists: bool) -> None:
        self._paths = PROBES | WEB_PAGE
        if not metrics_need_key:
            self._paths |= METRICS
        if public_voice_lists:
            self._paths |= VOICE_LISTS

    def exclude(self, path: str, method: str) -> bool:
        """Whether a request needs a key. Browsers send none with OPTIONS, and no route does anything for it."""
        if method == "OPTIONS":
            return False
        is_open = path in self._paths or path.startswith(WEB_PAGE_FOLDERS)
        return not (is_open and (method in ("GET", "HEAD") or path in PROBES))


def read_key_file(path: Path) -> tuple[str, ...]:
    """One key on each line; empty lines and those that begin with # do not count. Raises `ConfigError`."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error}") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{path} holds no API key: one on each line is expected")
    return keys


def _given_key(scope: Scope) -> bytes | None:
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer":
        return key.strip().encode("latin-1")
    if scope["type"] == "websocket":
        for protocol in scope["subprotocols"]:
            if protocol.startswith(_WEBSOCKET_KEY_PREFIX):
                return str(protocol)[len(_WEBSOCKET_KEY_PREFIX) :].encode()
    return None


def _refusal(*, is_missing: bool) -> AuthenticationError:
    if is_missing:
        return AuthenticationError(
            "You didn't provide an API key. Send it in an Authorization header: 'Authorization: Bearer YOUR_KEY'."
        )
    return AuthenticationError("Incorrect API key provided.")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
