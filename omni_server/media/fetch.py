"""Downloads media over HTTP from allowed hosts only, safe against server-side request forgery."""

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from omni_server.errors import ConfigError, InvalidRequestError
from omni_server.media.limits import MediaLimits

logger = logging.getLogger(__name__)

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHUNK_BYTES = 64 * 1024
_LOOKUP_THREADS = 4
_MAX_URL_CHARS = 8192
"""Most servers accept as much. A non-ASCII host name of megabytes would block the loop for seconds."""
_ALLOWED_PLACE = re.compile(r"([\w-]+(\.[\w-]+)*|\[[0-9A-Fa-f:.]+\])(:[1-9][0-9]{0,4})?")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""RFC 6052: the last 32 bits are an IPv4 address that a gateway connects to."""
_IPV4_COMPATIBLE = ipaddress.IPv6Network("::/96")
"""RFC 4291 section 2.5.5.1, deprecated: also an IPv4 address in the last 32 bits."""


class HttpFetcher:
    """Downloads from `allowed_domains` (see `source.MediaSource`), within the limits.

    The addresses that a name resolves to are checked and then connected to without another lookup, so a name
    that changes its address in between gains nothing. Redirects are followed here and checked like the first
    URL.
    """

    def __init__(self, allowed_domains: Sequence[str], limits: MediaLimits) -> None:
        self._limits = limits
        self._allowed_places = frozenset(_allowed_place(entry) for entry in allowed_domains)
        self._allowed_addresses = frozenset(
            address for host, _ in self._allowed_places if (address := _parse_address(host)) is not None
        )
        # An unanswered lookup blocks its thread for long, so these threads do nothing else.
        self._lookup_threads = ThreadPoolExecutor(_LOOKUP_THREADS, "media-lookup")

    async def fetch(self, url: str) -> bytes:
        """Returns the body behind an http(s) `url`. Raises `InvalidRequestError` like `MediaSource.read`."""
        try:
            async with asyncio.timeout(self._limits.fetch_timeout_s):
                return await self._follow(url)
        except TimeoutError as error:
            raise _fetch_failed(f"did not arrive within {self._limits.fetch_timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _fetch_failed("could not be fetched") from error

    async def _follow(self, url: str) -> bytes:
        connector = aiohttp.TCPConnector(
            resolver=_CheckingResolver(self._allowed_addresses, self._lookup_threads),
            use_dns_cache=False,
            force_close=True,
        )
        # The caller sets one time limit for everything. Bodies stay as they were sent: their size is what was
        # transferred, not what a compression bomb would become.
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity", "User-Agent": "omni-server"},
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            target = self._checked_url(url)
            for _ in range(self._limits.max_redirects + 1):
                async with session.get(target, allow_redirects=False) as response:
                    if response.status not in _REDIRECTS:
                        return await self._body(response)
                    location = response.headers.get("Location")
                if location is None:
                    raise _fetch_failed("could not be fetched")
                target = self._checked_url(location, base=target)
        raise _fetch_failed(f"was redirected more than {self._limits.max_redirects} times")

    def _checked_url(self, text: str, base: URL | None = None) -> URL:
        if len(text) > _MAX_URL_CHARS:
            raise invalid_url(f"is longer than {_MAX_URL_CHARS} characters")
        try:
            url = URL(text) if base is None else base.join(URL(text))
            host, port = url.raw_host, url.port
        except ValueError as error:
            raise invalid_url("is not a valid URL") from error
        if url.scheme not in ("http", "https") or not host or port is None:
            raise invalid_url("is not a valid http(s) URL")
        is_allowed = (host, port) in self._allowed_places or (
            url.is_default_port() and (host, None) in self._allowed_places
        )
        if not is_allowed:
            raise _not_allowed()
        return url

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        if response.status != 200:
            # Logged for the operator only: it would reveal the network behind the server to the caller.
            logger.info("media from %s: HTTP status %d", response.url.raw_host, response.status)
            raise _fetch_failed("could not be fetched")
        self._limits.check_size(response.content_length or 0)
        body = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            body += chunk
            self._limits.check_size(len(body))
        return bytes(body)


class _CheckingResolver(AbstractResolver):
    """The system's resolver, limited to addresses that are public or allowed.

    aiohttp connects to exactly what `resolve` returns. It does not call `resolve` for URLs whose host is an
    address: those are allowed literally or not at all.
    """

    def __init__(self, allowed_addresses: frozenset[IPAddress], threads: ThreadPoolExecutor) -> None:
        self._allowed_addresses = allowed_addresses
        self._threads = threads

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Resolves `host`. Raises `OSError` if it has none, `InvalidRequestError` if none is allowed."""
        look_up = partial(socket.getaddrinfo, host, port, family=family, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        results = [
            ResolveResult(
                hostname=host,
                host=str(sockaddr[0]),
                port=port,
                family=address_family,
                proto=protocol,
                flags=socket.AI_NUMERICHOST,
            )
            for address_family, _, protocol, _, sockaddr in found
            if self._is_allowed(ipaddress.ip_address(str(sockaddr[0]).partition("%")[0]))
        ]
        if not results:
            raise _not_allowed()
        return results

    def _is_allowed(self, address: IPAddress) -> bool:
        return is_public(address) or address in self._allowed_addresses

    async def close(self) -> None:
        """Nothing to release."""


def is_public(address: IPAddress) -> bool:
    """Whether an address is public; one that carries an IPv4 address is public if that address is."""
    if isinstance(address, ipaddress.IPv6Address):
        carried = address.ipv4_mapped or address.sixtofour
        if address in _NAT64 or address in _IPV4_COMPATIBLE:
            carried = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if address.teredo is not None:
            return False
        if carried is not None:
            return is_public(carried)
    return address.is_global and not address.is_multicast


def _allowed_place(entry: str) -> tuple[str, int | None]:
    """Returns the host of an allow-list entry, in yarl's form of a URL's host, and the port, if any. Raises
    `ConfigError`."""
    if _parse_address(entry) is not None:
        return str(ipaddress.ip_address(entry)), None
    try:
        url = URL(f"http://{entry}/") if _ALLOWED_PLACE.fullmatch(entry) else None
    except ValueError:
        url = None
    if url is None or url.raw_host is None:
        raise ConfigError(
            f"allowed media domain {entry!r} must be a host name or an IP address, with or without a port"
        )
    address = _parse_address(url.raw_host)
    return url.raw_host if address is None else str(address), url.explicit_port


def _parse_address(text: str) -> IPAddress | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _not_allowed() -> InvalidRequestError:
    return InvalidRequestError(
        "The media URL's host or port is not among the server's --allowed-media-domains.",
        code="media_not_allowed",
    )


def invalid_url(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"The media URL {what}.", code="invalid_url")


def _fetch_failed(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"The media URL {what}.", code="media_fetch_failed")
