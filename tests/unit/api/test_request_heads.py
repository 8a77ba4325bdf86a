"""What precedes a request's body, and its connection: bounded in size, number and time, and refused
in the envelope."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import websockets
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from omni_server.api.config import ApiConfig
from omni_server.api.http_protocol import HttpProtocol
from omni_server.api.websocket_protocol import WebSocketProtocol
from tests.unit.api.clients import URL, chat
from tests.unit.api.fake_generator import FakeGenerator, Hang, Wait, text_script
from tests.unit.api.schema import check_error
from tests.unit.api.test_server import QUIET, Life, client_of, served
from tests.unit.api.test_websocket_bytes import HANDSHAKE

GET = b"GET /live HTTP/1.1\r\nHost: localhost\r\n"
UPGRADE = HANDSHAKE.removesuffix(b"\r\n")
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = CHAT + b"Transfer-Encoding: chunked\r\n\r\n"
ONE_FIELD = b"X: " + b"x" * 66_000
FIELDS = b"".join(b"X-%d: %b\r\n" % (index, b"x" * 7000) for index in range(10)).rstrip()
END = b"\r\n\r\n"
DEADLINE_S = 20.0


@pytest.fixture
async def life(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Life]:
    """A server that serves on, and has logged neither warning nor error, whatever was sent."""
    life = Life()
    async with served(life):
        yield life
        async with client_of(life.address) as client:
            assert (await client.post(URL, json=chat())).status_code == 200
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@asynccontextmanager
async def connected(life: Life) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = life.address.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """What still comes until the server closes the connection."""
    return await asyncio.wait_for(reader.read(), DEADLINE_S)


async def answer_to(life: Life, data: bytes) -> bytes:
    async with connected(life) as (reader, writer):
        writer.write(data)
        return await rest_of(reader)


def refused(answer: bytes, status: int, code: str) -> dict[str, Any]:
    """The error of an answer after which the connection was closed."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status_line, *fields = head.decode().split("\r\n")
    assert status_line.split(" ")[:2] == ["HTTP/1.1", str(status)]
    headers = {name.lower(): value for name, value in (field.split(": ", 1) for field in fields)}
    assert headers["content-type"] == "application/json"
    assert headers["content-length"] == str(len(body))
    assert headers["connection"].lower() == "close"
    assert headers["x-request-id"].startswith("req_")
    envelope = json.loads(body)
    check_error(envelope)
    assert envelope["error"]["code"] == code
    error: dict[str, Any] = envelope["error"]
    return error


async def respond(reader: asyncio.StreamReader) -> int:
    """Reads one answer without a body of interest; its status."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE_S)
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    await asyncio.wait_for(reader.readexactly(length), DEADLINE_S)
    return int(head.split(b" ")[1])


@pytest.mark.parametrize(
    ("start", "fields"),
    [
        (GET, ONE_FIELD),
        (GET, ONE_FIELD + END),
        (GET, FIELDS),
        (GET, FIELDS + END),
        (UPGRADE, ONE_FIELD),  # websockets itself refuses a complete field of this size
        (UPGRADE, FIELDS),
        (UPGRADE, FIELDS + END),
    ],
)
async def test_headers_above_the_limit_are_refused(life: Life, start: bytes, fields: bytes) -> None:
    error = refused(await answer_to(life, start + fields), 431, "headers_too_large")
    assert "65536 bytes" in error["message"]


@pytest.mark.parametrize("start", [GET, UPGRADE], ids=["http", "websocket"])
async def test_a_header_without_end_is_refused_while_it_arrives(life: Life, start: bytes) -> None:
    """As bytes that come one after the other, of which the parser makes nothing until the field ends."""
    async with connected(life) as (reader, writer):
        writer.write(start + b"X: ")
        answer = asyncio.ensure_future(rest_of(reader))
        num_sent = 0
        while not answer.done() and num_sent < 50_000_000:
            writer.write(b"x" * 1000)
            num_sent += 1000
            await asyncio.sleep(0)
            await writer.drain()
        refused(await answer, 431, "headers_too_large")
    assert num_sent < 5_000_000


@pytest.mark.parametrize("start", [GET, UPGRADE], ids=["http", "websocket"])
async def test_too_many_header_fields_are_refused(life: Life, start: bytes) -> None:
    error = refused(await answer_to(life, start + b"X: x\r\n" * 100 + b"\r\n"), 431, "headers_too_large")
    assert "100 header fields" in error["message"]


@pytest.mark.parametrize(
    "rest",
    [b"x" * 16384 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", b"x" * 66_000],
    ids=["complete", "unfinished"],
)
async def test_a_url_above_the_limit_is_refused(life: Life, rest: bytes) -> None:
    refused(await answer_to(life, b"GET /live?" + rest), 414, "url_too_long")


async def test_a_head_within_the_limits_is_served_in_whatever_pieces_it_arrives(life: Life) -> None:
    url = b"/live?" + b"x" * 16_000
    fields = b"".join(b"X-%d: %b\r\n" % (index, b"x" * 480) for index in range(99))
    head = b"GET " + url + b" HTTP/1.1\r\nHost: localhost\r\n" + fields + b"\r\n"
    async with connected(life) as (reader, writer):
        for num_bytes in (len(head), 4096, 997):
            for begin in range(0, len(head), num_bytes):
                writer.write(head[begin : begin + num_bytes])
                await writer.drain()
                await asyncio.sleep(0)
            assert await respond(reader) == 200


async def test_limits_hold_for_every_request_of_a_connection_alone(life: Life) -> None:
    fields = b"X: " + b"x" * 40_000 + b"\r\n\r\n"
    async with connected(life) as (reader, writer):
        writer.write((GET + fields) * 3)
        assert [await respond(reader) for _ in range(3)] == [200, 200, 200]
        writer.write(GET + b"X: " + b"x" * 66_000)
        refused(await rest_of(reader), 431, "headers_too_large")


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["unfinished", "complete"])
async def test_trailers_count_as_headers(life: Life, end: bytes) -> None:
    async with connected(life) as (reader, writer):
        writer.write(CHUNKED + b"0\r\n")
        await asyncio.sleep(0.05)
        writer.write(b"X: " + b"x" * 100_000 + end)
        refused(await rest_of(reader), 431, "headers_too_large")


async def test_an_endless_chunk_extension_is_refused(life: Life) -> None:
    async with connected(life) as (reader, writer):
        writer.write(CHUNKED + b"1;")
        for _ in range(10):
            await asyncio.sleep(0.01)
            writer.write(b"x" * 10_000)
        refused(await rest_of(reader), 431, "headers_too_large")


async def test_a_body_of_tiny_chunks_is_no_header(life: Life) -> None:
    body = json.dumps(chat("x" * 30_000)).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    async with connected(life) as (reader, writer):
        for begin in range(0, len(CHUNKED + chunks), 5000):
            writer.write((CHUNKED + chunks)[begin : begin + 5000])
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        assert await respond(reader) == 200


IMPATIENT = replace(QUIET, header_timeout_s=0.3)


@pytest.mark.parametrize("before", [b"", GET + b"\r\n"], ids=["first request", "later request"])
@pytest.mark.parametrize(
    ("start", "drop"),
    [(b"GET /", b"x"), (GET + b"X: ", b"x"), (GET, b"X: x\r\n")],
    ids=["url", "field", "fields"],
)
async def test_a_head_that_drips_is_ended(before: bytes, start: bytes, drop: bytes) -> None:
    life = Life()
    async with served(life, IMPATIENT), connected(life) as (reader, writer):
        if before:
            writer.write(before)
            assert await respond(reader) == 200
        writer.write(start)
        answer = asyncio.ensure_future(rest_of(reader))
        while not answer.done():
            writer.write(drop)
            await asyncio.sleep(0.05)
        refused(await answer, 408, "header_timeout")


async def test_the_deadline_of_headers_is_none_of_the_answer() -> None:
    life = Life()
    life.generator.script = [Hang()]
    body = json.dumps(chat()).encode()
    head = CHAT + b"X: " + b"x" * 20_000  # more than the server reads at a time
    async with served(life, replace(IMPATIENT, http_keep_alive_s=1)), connected(life) as (reader, writer):
        writer.write(head + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body + b"GET /li")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.8)
        assert not life.generator.generations[0].closed.is_set()


async def test_a_connection_that_says_nothing_is_closed() -> None:
    life = Life()
    async with served(life, replace(QUIET, http_keep_alive_s=1)), connected(life) as (reader, _):
        assert await rest_of(reader) == b""


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET /live HTTP/1.1\r\n\r\n", "Missing mandatory Host: header"),
        (GET + b"Host: example\r\n\r\n", "Found multiple Host: headers"),
        (b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n", "illegal header line"),
        (b"nonsense\r\n\r\n", "illegal request line"),
        (b"\r\n", "no request line"),
        (b"\x16\x03\x01\x02\x00\x01\x00", "illegal request line"),  # TLS
        (b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", "illegal request line"),
        (CHUNKED + b"zz\r\n", "illegal chunk header"),
        (GET + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", "conflicting Content-Length headers"),
    ],
)
async def test_what_is_no_request_gets_the_envelope(life: Life, data: bytes, reason: str) -> None:
    error = refused(await answer_to(life, data), 400, "invalid_http_request")
    assert reason in error["message"]


@pytest.mark.parametrize("field", [b"", b"Connection: close\r\n"], ids=["kept open", "closed"])
async def test_nonsense_behind_a_request_does_not_change_its_answer(field: bytes) -> None:
    go_on = asyncio.Event()
    life = Life(FakeGenerator(script=[Wait(go_on), *text_script()]))
    body = json.dumps(chat()).encode()
    async with served(life), connected(life) as (reader, writer):
        head = CHAT + field + b"Content-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        await asyncio.wait_for(life.generator.submitted.wait(), DEADLINE_S)
        writer.write(b"nonsense\r\n\r\n")
        await asyncio.sleep(0.05)
        go_on.set()
        assert await respond(reader) == 200
        rest = await rest_of(reader)
        if field:
            assert rest == b""
        else:
            refused(rest, 400, "invalid_http_request")


@pytest.mark.parametrize(
    ("data", "status", "part"),
    [
        (
            HANDSHAKE.replace(b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n", b""),
            400,
            "Sec-WebSocket-Key",
        ),
        (HANDSHAKE.replace(b"version: 13", b"version: 12"), 400, "Sec-WebSocket-Version"),
        (HANDSHAKE.replace(b"GET", b"POST"), 405, "unsupported HTTP method"),
        (UPGRADE + b"X: " + b"x" * 10_000 + b"\r\n\r\n", 431, "8192 bytes"),
    ],
)
async def test_a_broken_handshake_gets_the_envelope(life: Life, data: bytes, status: int, part: str) -> None:
    error = refused(await answer_to(life, data), status, "invalid_websocket_handshake")
    assert part in error["message"]


async def test_a_websocket_at_an_unknown_url_is_404(life: Life) -> None:
    with pytest.raises(websockets.InvalidStatus) as refusal:
        await websockets.connect(life.address.replace("http", "ws", 1) + "/v1/nope")
    response = refusal.value.response
    assert response.status_code == 404
    assert json.loads(response.body)["error"]["code"] == "unknown_url"


async def test_a_declared_body_above_the_limit_ends_the_connection(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omni_server.api.limits.LINGER_S", 0.3)
    head = CHUNKED.replace(b"Transfer-Encoding: chunked", b"Content-Length: 1000000000000")
    refused(await answer_to(life, head), 413, "request_too_large")
    refused(await answer_to(life, head + b"{" * 10_000), 413, "request_too_large")


async def test_a_client_gets_the_answer_though_it_goes_on_sending_a_body_that_is_too_large() -> None:
    life = Life()
    async with served(life, replace(QUIET, max_body_bytes=1000)), connected(life) as (reader, writer):
        writer.write(CHUNKED.replace(b"Transfer-Encoding: chunked", b"Content-Length: 20000000"))
        for _ in range(20):
            writer.write(b"x" * 1_000_000)
            await asyncio.wait_for(writer.drain(), DEADLINE_S)
        refused(await rest_of(reader), 413, "request_too_large")


async def test_a_client_that_never_ends_its_refused_body_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_server.api.limits.LINGER_S", 0.3)
    life = Life()
    async with served(life), connected(life) as (reader, writer):
        writer.write(b"POST /v1/nope HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        assert await respond(reader) == 404
        answer = asyncio.ensure_future(rest_of(reader))
        while not answer.done():
            writer.write(b"x")
            await asyncio.sleep(0.02)
        with suppress(ConnectionResetError):
            assert await answer == b""


async def test_a_connection_is_used_again_when_the_body_that_was_not_wanted_has_arrived(life: Life) -> None:
    async with connected(life) as (reader, writer):
        writer.write(b"POST /v1/nope HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        assert await respond(reader) == 404
        writer.write(b"x" * 1_000_000 + GET + b"\r\n")
        assert await respond(reader) == 200


async def test_a_request_that_came_with_the_rest_of_a_refused_body_is_not_cut_by_the_idle_timeout() -> None:
    go_on = asyncio.Event()
    life = Life(FakeGenerator(script=[Wait(go_on), *text_script()]))
    body = json.dumps(chat()).encode()
    head = CHAT + f"Content-Length: {len(body)}\r\n\r\n".encode()
    async with served(life, ApiConfig(port=0, http_keep_alive_s=1)), connected(life) as (reader, writer):
        writer.write(b"POST /v1/nope HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
        assert await respond(reader) == 404
        writer.write(b"x" * 1_000 + head + body)
        asyncio.get_running_loop().call_later(1.5, go_on.set)
        assert await respond(reader) == 200


async def test_refusals_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    life = Life()
    async with served(life, ApiConfig(port=0)):
        await answer_to(life, GET + b"X: x\r\n" * 100 + b"\r\n")
        await answer_to(life, GET + b"X: " + b"x" * 66_000)
        async with client_of(life.address) as client:
            metrics = (await client.get("/metrics")).text
    assert 'http_requests_total{handler="none",method="GET",status="431"} 1' in metrics
    assert 'http_requests_total{handler="none",method="other",status="431"} 1' in metrics
    assert "GET /live 431" in caplog.text
    assert "unreadable request 431" in caplog.text
    assert "headers_too_large" in caplog.text


def test_uvicorn_has_what_the_protocols_override_and_use() -> None:
    """To be looked at where another release of uvicorn is to be allowed: what is missing is not bounded."""
    own = {"idle_since", "is_idle", "get_buffer", "buffer_updated"}
    used = {"client", "conn", "cycle", "flow", "loop", "server_state", "timeout_keep_alive_handler"}
    used |= {"timeout_keep_alive", "timeout_keep_alive_task", "transport"}
    names = {*vars(H11Protocol), *H11Protocol.__init__.__code__.co_names}
    assert (public(HttpProtocol) | used) - own - names == set()
    used = {"conn", "frames", "handle_parser_exception", "transport", "writable", "close_sent"}
    names = {*vars(WebSocketsSansIOProtocol), *WebSocketsSansIOProtocol.__init__.__code__.co_names}
    assert (public(WebSocketProtocol) | used) - names == set()


def public(derived: type) -> set[str]:
    return {name for name in vars(derived) if not name.startswith("_")}
