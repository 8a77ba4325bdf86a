import asyncio
import base64
import gzip
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from urllib.parse import quote, quote_from_bytes

import pytest
from aiohttp import web

from omni_server.errors import ConfigError, InvalidRequestError
from omni_server.media.fetch import is_public
from omni_server.media.limits import MediaLimits
from omni_server.media.source import MediaSource, decode_base64

ALL_BYTES = bytes(range(256))
BASE64 = base64.b64encode(ALL_BYTES).decode()
SECRET = "the body of an answer"
LOOPBACK = "127.0.0.1"


async def _read(url: str, *allowed: str, limits: MediaLimits | None = None) -> bytes:
    return await MediaSource(allowed, limits or MediaLimits()).read(url)


async def _refusal(url: str, *allowed: str, limits: MediaLimits | None = None) -> tuple[str | None, str]:
    """Code and message of the error that reading `url` gives."""
    with pytest.raises(InvalidRequestError) as caught:
        await _read(url, *allowed, limits=limits)
    assert caught.value.param is None
    assert SECRET not in caught.value.message
    return caught.value.code, caught.value.message


class Server:
    """A web server on the loopback address that notes the paths it was asked for."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.stopping = asyncio.Event()
        self.port = 0

    def url(self, path: str, host: str = LOOPBACK) -> str:
        return f"http://{host}:{self.port}{path}"

    def at(self, host: str = LOOPBACK) -> str:
        """An entry that allows it."""
        return f"{host}:{self.port}"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path_qs)
        match request.path:
            case "/all-bytes":
                return web.Response(body=ALL_BYTES)
            case "/compressed":
                return web.Response(body=gzip.compress(bytes(1 << 20)), headers={"Content-Encoding": "gzip"})
            case "/headers":
                return web.Response(text="\n".join(sorted(request.headers)))
            case "/redirect":
                return web.Response(status=302, headers={"Location": request.query["to"]}, text=SECRET)
            case "/redirect-times":
                left = int(request.query["n"])
                target = "/all-bytes" if left == 1 else f"/redirect-times?n={left - 1}"
                return web.Response(status=307, headers={"Location": target})
            case "/status":
                return web.Response(status=int(request.query["code"]), text=SECRET)
            case "/claims-much":
                return web.Response(headers={"Content-Length": str(1 << 40)})
            case "/cut-short":
                response = web.StreamResponse(headers={"Content-Length": "1000"})
                await response.prepare(request)
                await response.write(SECRET.encode())
                assert request.transport is not None
                request.transport.close()
                return response
            case "/endless":
                return await self._stream(request, b"x" * 65_536, pause_s=0.0)
            case "/drip":
                return await self._stream(request, b"x", pause_s=0.01)
            case "/silent":
                await self.stopping.wait()
                return web.Response()
        return web.Response(status=404, text=SECRET)

    async def _stream(self, request: web.Request, piece: bytes, pause_s: float) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while not self.stopping.is_set():
            try:
                await response.write(piece)
            except ConnectionError:  # the client has hung up
                break
            await asyncio.sleep(pause_s)
        return response


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_get("/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, LOOPBACK, 0)
    await site.start()
    server.port = runner.addresses[0][1]
    yield server
    server.stopping.set()
    await runner.cleanup()


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`lookups(*addresses)` makes the system's resolver answer every name with these; gives the names asked
    for."""

    def install(*addresses: str) -> list[str]:
        asked: list[str] = []

        def getaddrinfo(host: str, port: int, *_: object, **__: object) -> list[tuple[object, ...]]:
            asked.append(host)
            families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
            return [
                (family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port))
                for family, address in zip(families, addresses, strict=True)
            ]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        return asked

    return install


class TestDataUrls:
    @pytest.mark.parametrize(
        ("url", "data"),
        [
            (f"data:;base64,{BASE64}", ALL_BYTES),
            (f"data:audio/wav;rate=16000;base64,{BASE64}", ALL_BYTES),
            (f"data:image/png;name=a%20b.png;base64,{BASE64}", ALL_BYTES),
            ("DATA:AUDIO/X;BASE64,QUJD", b"ABC"),
            (f"data:;base64,{quote(BASE64, safe='')}", ALL_BYTES),
            (f"data:application/octet-stream,{quote_from_bytes(ALL_BYTES)}", ALL_BYTES),
            ("data:,a,b", b"a,b"),
        ],
    )
    async def test_all_spellings_are_read(self, url: str, data: bytes) -> None:
        assert await _read(url) == data

    @pytest.mark.parametrize("payload", ["", "QU", "QUI=QUI=", "QUJD*", "%ff%ff", "QUJ%C3%84"])
    async def test_wrong_base64_is_refused(self, payload: str) -> None:
        code, message = await _refusal(f"data:;base64,{payload}")
        assert code == "invalid_base64"
        assert "base64" in message

    @pytest.mark.parametrize("url", ["data:", "data:audio/wav;base64", "data:,"])
    async def test_urls_without_data_are_refused(self, url: str) -> None:
        assert (await _refusal(url))[0] == "invalid_url"

    @pytest.mark.parametrize("url", ["data:," + "a" * 7, "data:," + "%61" * 7, "data:;base64,QUJDQUJDQQ=="])
    async def test_more_bytes_than_allowed_are_refused(self, url: str) -> None:
        assert len(await _read(url, limits=MediaLimits(max_bytes=7))) == 7
        code, message = await _refusal(url, limits=MediaLimits(max_bytes=6))
        assert code == "media_too_large"
        assert "6 bytes" in message

    async def test_a_far_too_long_url_is_refused_undecoded(self) -> None:
        assert (await _refusal("data:;base64," + "*" * 1_000, limits=MediaLimits(max_bytes=6)))[
            0
        ] == "media_too_large"


class TestWhoMayBeAsked:
    @pytest.mark.parametrize(
        "url",
        [
            "",
            "picture.png",
            "/etc/hostname",
            "file:///etc/hostname",
            "FILE:///etc/hostname",
            "ftp://127.0.0.1/x",
            "gopher://127.0.0.1/x",
            "javascript:alert(1)",
            "127.0.0.1/x",
            " http://127.0.0.1/x",
        ],
    )
    async def test_other_schemes_are_refused(self, url: str) -> None:
        assert (await _refusal(url, LOOPBACK))[0] == "media_not_allowed"

    @pytest.mark.parametrize(
        "url", ["http://", "http:", "http:///x", "https://[::1", "http://127.0.0.1:99999/"]
    )
    async def test_broken_urls_are_refused(self, url: str) -> None:
        assert (await _refusal(url, LOOPBACK))[0] == "invalid_url"

    async def test_without_an_allow_list_no_host_is_asked(self, server: Server) -> None:
        assert (await _refusal(server.url("/all-bytes")))[0] == "media_not_allowed"
        assert server.paths == []

    @pytest.mark.parametrize(
        "host",
        [
            "other.example",
            "sub.media.example",
            "media.example.",
            "media.example.evil.example",
            "media.example@evil.example",
            "127.1",
            "2130706433",
            "0x7f000001",
            "[::ffff:127.0.0.1]",
            "0.0.0.0",
        ],
    )
    async def test_hosts_that_only_resemble_an_allowed_one_are_refused(
        self, server: Server, lookups: Callable[..., list[str]], host: str
    ) -> None:
        asked = lookups(LOOPBACK)
        assert (await _refusal(server.url("/all-bytes", host), server.at("media.example"), server.at()))[
            0
        ] == "media_not_allowed"
        assert asked == []
        assert server.paths == []

    @pytest.mark.parametrize(
        ("allowed", "host"), [("media.example", "MEDIA.example"), ("Media.Example", "media.example")]
    )
    async def test_names_are_compared_without_case(
        self, server: Server, lookups: Callable[..., list[str]], allowed: str, host: str
    ) -> None:
        lookups(LOOPBACK)
        assert await _read(server.url("/all-bytes", host), server.at(allowed), LOOPBACK) == ALL_BYTES

    @pytest.mark.parametrize("allowed", [LOOPBACK, f"{LOOPBACK}:1", "[::1]", "[::1]:80"])
    async def test_an_entry_opens_no_other_port(self, server: Server, allowed: str) -> None:
        assert (await _refusal(server.url("/all-bytes"), allowed))[0] == "media_not_allowed"
        redirected = server.url(f"/redirect?to={quote('http://127.0.0.1:1/x')}")
        assert (await _refusal(redirected, server.at()))[0] == "media_not_allowed"
        assert server.paths == ["/redirect?to=http://127.0.0.1:1/x"]

    @pytest.mark.parametrize(
        ("url", "allowed"),
        [
            ("http://media.example/x", "media.example"),
            ("https://media.example/x", "media.example"),
            ("http://media.example:80/x", "media.example"),
            ("http://media.example:8080/x", "media.example:8080"),
            ("https://media.example:80/x", "media.example:80"),
        ],
    )
    async def test_an_entry_opens_the_default_port_or_its_own(
        self, lookups: Callable[..., list[str]], url: str, allowed: str
    ) -> None:
        asked = lookups("10.0.0.1")
        # Refused for its address, which comes after.
        assert (await _refusal(url, allowed))[0] == "media_not_allowed"
        assert asked == ["media.example"]

    @pytest.mark.parametrize("entry", ["::1", "[::1]:{port}", "[0:0::1]:{port}"])
    async def test_entries_may_be_addresses_of_ip_6(self, entry: str) -> None:
        with socket.socket(socket.AF_INET6) as unused:
            unused.bind(("::1", 0))
            port = unused.getsockname()[1]
            code, _ = await _refusal(f"http://[::1]:{port}/x", entry.format(port=port))
        assert code == ("media_not_allowed" if entry == "::1" else "media_fetch_failed")

    async def test_names_are_looked_up_in_threads_of_their_own(
        self, server: Server, lookups: Callable[..., list[str]]
    ) -> None:
        lookups(LOOPBACK)
        release, executor = threading.Event(), ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(executor)
        blocked = asyncio.ensure_future(asyncio.to_thread(release.wait, 30))
        await asyncio.sleep(0)
        try:
            reading = _read(server.url("/all-bytes", "media.example"), server.at("media.example"), LOOPBACK)
            assert await asyncio.wait_for(reading, 10) == ALL_BYTES
        finally:
            release.set()
            await blocked

    async def test_international_names_are_compared_in_their_ascii_form(
        self, server: Server, lookups: Callable[..., list[str]]
    ) -> None:
        asked = lookups(LOOPBACK)
        assert (
            await _read(
                server.url("/all-bytes", "b\u00fccher.example"), server.at("b\u00fccher.example"), LOOPBACK
            )
            == ALL_BYTES
        )
        assert asked == ["xn--bcher-kva.example"]

    @pytest.mark.parametrize(
        "entry",
        [
            "",
            "http://media.example",
            "media.example:",
            "media.example:0",
            "media.example:65536",
            "media.example:http",
            "media.example:80:80",
            "[::1",
            "[1.2.3.4]",
            "media.example/x",
            "user@media.example",
            "a b",
            "*.example",
            ".example",
        ],
    )
    def test_allow_list_entries_must_be_hosts_with_or_without_a_port(self, entry: str) -> None:
        with pytest.raises(ConfigError, match="host name or an IP address"):
            MediaSource([entry], MediaLimits())


class TestAddresses:
    @pytest.mark.parametrize(
        "address", ["127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.169.254", "::1", "fe80::1"]
    )
    async def test_an_allowed_name_does_not_open_addresses_that_are_not_public(
        self, server: Server, lookups: Callable[..., list[str]], address: str
    ) -> None:
        lookups(address)
        url = server.url("/all-bytes", "media.example")
        assert (await _refusal(url, server.at("media.example")))[0] == "media_not_allowed"
        assert server.paths == []

    async def test_an_allowed_name_opens_an_address_that_is_allowed_as_well(
        self, server: Server, lookups: Callable[..., list[str]]
    ) -> None:
        lookups("::1", LOOPBACK)
        assert (
            await _read(server.url("/all-bytes", "media.example"), server.at("media.example"), LOOPBACK)
            == ALL_BYTES
        )

    async def test_the_address_that_was_checked_is_the_one_connected_to(
        self, server: Server, lookups: Callable[..., list[str]]
    ) -> None:
        asked = lookups(LOOPBACK)
        await _read(server.url("/all-bytes", "media.example"), server.at("media.example"), LOOPBACK)
        assert asked == ["media.example"]

    async def test_a_name_without_addresses_cannot_be_fetched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def getaddrinfo(*_: object, **__: object) -> list[object]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        code, message = await _refusal("http://media.example/x", "media.example")
        assert (code, message) == ("media_fetch_failed", "The media URL could not be fetched.")

    @pytest.mark.parametrize(
        "address", ["8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
    )
    def test_public_addresses(self, address: str) -> None:
        assert is_public(ip_address(address))

    @pytest.mark.parametrize(
        "address",
        [
            "0.0.0.0",
            "10.0.0.1",
            "100.64.0.1",
            "127.0.0.1",
            "127.255.255.254",
            "169.254.169.254",
            "172.16.0.1",
            "192.168.1.1",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::127.0.0.1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "64:ff9b::7f00:1",
            "64:ff9b::a9fe:a9fe",
            "2002:7f00:1::",
            "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        ],
    )
    def test_addresses_that_are_not_public(self, address: str) -> None:
        assert not is_public(ip_address(address))


class TestRedirects:
    async def test_relative_and_absolute_redirects_are_followed(self, server: Server) -> None:
        for target in ("/all-bytes", "all-bytes", server.url("/all-bytes")):
            assert await _read(server.url(f"/redirect?to={quote(target)}"), server.at()) == ALL_BYTES

    async def test_three_redirects_are_followed_and_no_more(self, server: Server) -> None:
        assert await _read(server.url("/redirect-times?n=3"), server.at()) == ALL_BYTES
        server.paths.clear()
        code, message = await _refusal(server.url("/redirect-times?n=4"), server.at())
        assert (code, message) == ("media_fetch_failed", "The media URL was redirected more than 3 times.")
        assert "/all-bytes" not in server.paths

    @pytest.mark.parametrize(
        "target", ["http://evil.example/x", "//evil.example/x", "http://169.254.169.254/latest"]
    )
    async def test_redirects_to_hosts_that_are_not_allowed_are_refused(
        self, server: Server, target: str
    ) -> None:
        code, message = await _refusal(server.url(f"/redirect?to={quote(target)}"), server.at())
        assert code == "media_not_allowed"
        assert "evil" not in message

    @pytest.mark.parametrize("target", ["file:///etc/hostname", "data:,abc", "ftp://127.0.0.1/x"])
    async def test_redirects_to_other_schemes_are_refused(self, server: Server, target: str) -> None:
        assert (await _refusal(server.url(f"/redirect?to={quote(target)}"), server.at()))[0] == "invalid_url"

    async def test_a_redirect_to_an_allowed_name_at_a_private_address_is_refused(
        self, server: Server, lookups: Callable[..., list[str]]
    ) -> None:
        lookups("10.0.0.1")
        url = server.url(f"/redirect?to={quote('http://media.example/x')}")
        assert (await _refusal(url, server.at(), "media.example"))[0] == "media_not_allowed"


class TestBodies:
    async def test_a_body_of_just_the_limit_is_read(self, server: Server) -> None:
        assert (
            await _read(server.url("/all-bytes"), server.at(), limits=MediaLimits(max_bytes=256)) == ALL_BYTES
        )
        code, message = await _refusal(
            server.url("/all-bytes"), server.at(), limits=MediaLimits(max_bytes=255)
        )
        assert code == "media_too_large"
        assert "255 bytes" in message

    async def test_an_endless_body_is_cut_off(self, server: Server) -> None:
        limits = MediaLimits(max_bytes=1 << 20)
        assert (await _refusal(server.url("/endless"), server.at(), limits=limits))[0] == "media_too_large"

    async def test_a_body_declared_too_large_is_not_awaited(self, server: Server) -> None:
        assert (await _refusal(server.url("/claims-much"), server.at()))[0] == "media_too_large"

    async def test_a_compressed_body_is_not_inflated(self, server: Server) -> None:
        body = await _read(server.url("/compressed"), server.at(), limits=MediaLimits(max_bytes=10_000))
        assert gzip.decompress(body) == bytes(1 << 20)

    async def test_a_body_cut_short_fails(self, server: Server) -> None:
        assert (await _refusal(server.url("/cut-short"), server.at()))[0] == "media_fetch_failed"

    @pytest.mark.parametrize("path", ["/silent", "/drip"])
    async def test_a_slow_server_is_given_up(self, server: Server, path: str) -> None:
        code, message = await _refusal(server.url(path), server.at(), limits=MediaLimits(fetch_timeout_s=0.2))
        assert (code, message) == ("media_fetch_failed", "The media URL did not arrive within 0.2 s.")

    @pytest.mark.parametrize("status", [204, 206, 304, 400, 401, 404, 500, 503])
    async def test_other_statuses_fail(self, server: Server, status: int) -> None:
        refusal = await _refusal(server.url(f"/status?code={status}"), server.at())
        assert refusal == ("media_fetch_failed", "The media URL could not be fetched.")

    async def test_a_server_that_is_not_there_cannot_be_fetched(self) -> None:
        with socket.socket() as unused:
            unused.bind((LOOPBACK, 0))
            port = unused.getsockname()[1]
            code, message = await _refusal(f"http://{LOOPBACK}:{port}/x", f"{LOOPBACK}:{port}")
        assert (code, message) == ("media_fetch_failed", "The media URL could not be fetched.")

    async def test_requests_carry_no_cookies_or_credentials(self, server: Server) -> None:
        headers = (await _read(server.url("/headers"), server.at())).decode().lower().split()
        assert set(headers) == {"host", "accept", "accept-encoding", "user-agent", "connection"}


async def test_an_endless_url_is_refused_before_it_is_looked_into() -> None:
    """A host of a million letters in another script kept the event loop for seconds; found by enlarging
    URLs."""
    url = f"http://{'あ' * 1_500_000}/"
    assert await _refusal(url) == ("invalid_url", "The media URL is longer than 8192 characters.")
    assert (await _refusal("http://host.example/" + "a" * 8_000))[0] == "media_not_allowed"


def test_white_space_in_base64_is_ignored() -> None:
    assert decode_base64(" " + base64.encodebytes(ALL_BYTES).decode().replace("\n", "\r\n\t")) == ALL_BYTES


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "=",
        "====",
        "A",
        "QUJD=",
        "QUJD====",
        "QUI=====",
        "QUJDQ===",
        "QUI=QUI=",
        "QUI",  # padding is missing
        "QUI==",
        "QU=I",
        "QUJDQQ==QUJD",
        "QUJD!",
        "QUJD,QUJD",
        "-_-_",  # the URL alphabet
        "data:audio/wav;base64,QUJD",
        "QUJ\u00c4",
        "QUJ\uff21",
        "QUJD\u00a0",
        "QUJD\0",
    ],
)
def test_what_is_no_base64_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode_base64(text)
    assert caught.value.code == "invalid_base64"
    assert caught.value.param is None
    assert "base64" in caught.value.message
