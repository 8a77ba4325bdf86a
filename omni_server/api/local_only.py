"""Who may ask a server that is meant for one machine and has no key."""

from collections.abc import Sequence
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from omni_server.api.config import ApiConfig
from omni_server.api.errors import error_response
from omni_server.errors import HostNotAllowedError


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` can be reached from its own machine only."""
    return host == "localhost" or (_is_ip_address(host) and ip_address(host).is_loopback)


def is_local_only(config: ApiConfig) -> bool:
    """Without keys, open to this machine's programs: to its browsers too, and so to web pages, if nothing is done."""
    return not config.api_keys and config.uds is None and is_loopback(config.host)


class HostMiddleware:
    """403 for requests whose `Host` is a name that the server is not known to have.

    A web page can make its own host name resolve to 127.0.0.1 (DNS rebinding). To the browser the server is then part
    of that web site: neither CORS nor a comparison of `Origin` and `Host` keeps the page from reading answers. What it
    cannot change is the name in `Host`. Addresses are nobody's name, and requests without `Host` are no browser's.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Sequence[str]) -> None:
        """`*` among the origins lets every host in."""
        self.app = app
        self._is_open = "*" in allowed_origins
        names = {_without_port(origin.partition("://")[2]) for origin in allowed_origins}
        self._names = frozenset((names | {"localhost"}) - {""})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not self._is_allowed(Headers(scope=scope)):
            error = HostNotAllowedError(
                "This server is open to its own machine only: it is not asked by the name in the Host header."
            )
            await error_response(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        if self._is_open:
            return True
        return all(self._is_known(host) for host in headers.getlist("host"))

    def _is_known(self, host: str) -> bool:
        name = _without_port(host)
        return name in self._names or _is_ip_address(name)


def _without_port(host: str) -> str:
    """As in `localhost:8091` and `[::1]:8091`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _is_ip_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
