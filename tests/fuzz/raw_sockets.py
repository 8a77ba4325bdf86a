"""What no HTTP or WebSocket client would send, byte by byte to a server on a socket."""

import asyncio
import json
import random
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from tests.fuzz.mutate import changed_bytes
from tests.fuzz.oracle import check_log, watched_log
from tests.fuzz.realtime_events import EVENTS
from tests.fuzz.target import Run, Target
from tests.unit.api.clients import URL, chat
from tests.unit.api.test_server import QUIET, Life, client_of, served

ANSWER_S = 0.5
"""How long an answer is waited for: what is no whole request gets none."""
REST_S = 0.1
"""How long for more of it."""
DEADLINE_S = 60.0
_CHECK_EVERY = 20

_BODY = json.dumps(chat()).encode()
_FIRST = b"POST " + URL.encode() + b" HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
REQUESTS = (
    _FIRST + b"content-length: %d\r\n\r\n" % len(_BODY) + _BODY,
    _FIRST + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(_BODY) + _BODY + b"\r\n0\r\n\r\n",
    _FIRST + b"expect: 100-continue\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(_BODY) + _BODY,
    b"GET /v1/models/omni?a=%20b HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer x\r\norigin: http://a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 3,
    b"HEAD / HTTP/1.0\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\naccess-control-request-method: POST\r\n\r\n",
)
_INSERTS = (
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"\r\n ", b"\r\ncontent-length: 0",
    b"\r\ncontent-length: 5\r\ncontent-length: 6", b"\r\ntransfer-encoding: chunked",
    b"\r\nTransfer-Encoding: gzip, chunked", b"\r\ntransfer-encoding:\x0bchunked", b"\r\ncontent-length: -1",
    b"\r\ncontent-length: 99999999999999999999", b"\r\ncontent-length: +5", b"\r\nx: " + b"y" * 70_000,
    b"\r\nx: y" * 3_000, b"ffffffffffffffff\r\n", b"0;ext=" + b"e" * 9_000 + b"\r\n", b"-5\r\n", b"0\r\n", b"0x5\r\n",
    b"\r\nhost: a\r\nhost: b", b"\r\nupgrade: websocket\r\nconnection: upgrade",
    b"\r\nupgrade: h2c\r\nhttp2-settings: AAAA", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00",
    b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/9.9", b"/" * 9_000, b"%ff%00", b"%zz", b"//evil/", b"http://evil/",
    b"?" + b"a=b&" * 3_000, b"\xc3\xa9", b"\xff\xfe", b"/../../etc/passwd", b"#", b"\r\nx-request-id: a\r\n b",
    b"GET / HTTP/1.1\r\n\r\n", b"\r\nexpect: x", b"\r\ntraceparent: 00-\xff", b"\r\n\xff: a", b"\r\n: a",
    b"\r\nx y: a",
)  # fmt: skip


class _Server:
    """A running server, and the checks that it is well."""

    def __init__(self, life: Life) -> None:
        self.host, _, port = life.address.removeprefix("http://").partition(":")
        self.port = int(port)
        self._address = life.address
        self._num_checked = 0

    async def check(self) -> None:
        """Now and then: the next request is served, and no session is left."""
        self._num_checked += 1
        if self._num_checked % _CHECK_EVERY:
            return
        async with client_of(self._address) as client:
            assert (await client.post(URL, json=chat())).status_code == 200, "the next request is not served"
            async with asyncio.timeout(DEADLINE_S):
                while (await client.get("/load")).json()["server_load"]:  # noqa: ASYNC110 (it can only be asked)
                    await asyncio.sleep(0.02)


@asynccontextmanager
async def _served() -> AsyncIterator[_Server]:
    life = Life()
    async with served(life, replace(QUIET, log_level="error", body_timeout_s=2, realtime_send_timeout_s=2)):
        yield _Server(life)


@asynccontextmanager
async def _http() -> AsyncIterator[Run]:
    with watched_log() as log:
        async with _served() as server:

            async def run(rng: random.Random) -> str:
                data = changed_bytes(rng, rng.choice(REQUESTS), _INSERTS)
                async with asyncio.timeout(DEADLINE_S):
                    answer = await _exchange(server, data, rng, ends=(b"}", b"0\r\n\r\n"))
                    await server.check()
                check_log(log)
                if not answer:
                    return "no answer"
                assert answer.startswith(b"HTTP/1."), answer[:200]
                statuses = [
                    int(line[9:12]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")
                ]
                assert not [status for status in statuses if status >= 500], answer[:500]
                return str(statuses[0])

            yield run


async def _exchange(
    server: _Server, data: bytes, rng: random.Random, *, ends: tuple[bytes, ...] = (), first: bytes = b""
) -> bytes:
    """Sends `first` and waits for an answer, then `data` in pieces; what comes back until nothing does, or up
    to one of `ends`."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    answer = b""
    with suppress(ConnectionError):
        try:
            if first:
                writer.write(first)
                with suppress(TimeoutError):
                    async with asyncio.timeout(ANSWER_S):
                        answer = await reader.read(1 << 16)
            while data:
                end = rng.choice((1, 50, len(data), len(data)))
                writer.write(data[:end])
                data = data[end:]
                await writer.drain()
            with suppress(TimeoutError):
                while not (answer and ends and answer.endswith(ends)):
                    async with asyncio.timeout(ANSWER_S if not answer else REST_S):
                        piece = await reader.read(1 << 16)
                    if not piece:
                        break
                    answer += piece
        finally:
            writer.close()
            await writer.wait_closed()
    return answer


_HANDSHAKE = (
    b"GET /v1/realtime?model=omni HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
_CLOSED_BY_PROTOCOL = frozenset({1000, 1001, 1002, 1003, 1007, 1008, 1009})
"""1011 would be a failure of the server."""


def _ws_frame(payload: bytes, *, first: int, mask: bytes | None, length: int | None = None) -> bytes:
    """`length` is what is claimed, if it is not the payload's."""
    size = len(payload) if length is None else length
    masked = 0x80 if mask is not None else 0
    if size < 126:
        head = struct.pack("!BB", first, masked | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", first, masked | 126, size)
    else:
        head = struct.pack("!BBQ", first, masked | 127, size)
    if mask is None:
        return head + payload
    return head + mask + bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))


def _frames(rng: random.Random) -> bytes:
    """Up to six frames, most of them wrong in one way."""
    sent = b""
    for _ in range(rng.randrange(1, 7)):
        text = json.dumps(rng.choice(EVENTS)).encode()[:2_000]
        mask = rng.randbytes(4)
        match rng.randrange(14):
            case 0:
                sent += _ws_frame(text, first=rng.randrange(256), mask=mask)
            case 1:
                sent += _ws_frame(text, first=0x81, mask=None)
            case 2:
                sent += _ws_frame(
                    text, first=0x81, mask=mask, length=rng.choice((0, 5, 2_000_000, 2**31, 2**63 - 1, 2**63))
                )
            case 3:
                cut = rng.randrange(len(text))
                sent += _ws_frame(text[:cut], first=0x01, mask=mask) + _ws_frame(
                    text[cut:], first=0x80, mask=mask
                )
            case 4:
                sent += _ws_frame(text[:9], first=0x01, mask=mask) * 2
            case 5:
                sent += _ws_frame(b"", first=rng.choice((0x00, 0x80)), mask=mask) * rng.choice((1, 500))
            case 6:
                sent += _ws_frame(
                    rng.randbytes(rng.choice((0, 125, 126))), first=rng.choice((0x89, 0x8A, 0x09)), mask=mask
                )
            case 7:
                sent += _ws_frame(b"x" * 125, first=0x89, mask=mask) * 500
            case 8:
                code = rng.choice((0, 999, 1000, 1004, 1005, 1006, 1015, 2999, 5000, 65535))
                sent += _ws_frame(
                    struct.pack("!H", code) + rng.choice((b"", b"bye", b"\xff")), first=0x88, mask=mask
                )
            case 9:
                sent += _ws_frame(b"\x03", first=0x88, mask=mask)
            case 10:
                sent += _ws_frame(
                    rng.choice((b"\xff", b"\xed\xa0\x80", b"\xc0\x80", text + b"\xf0\x9f")),
                    first=0x81,
                    mask=mask,
                )
            case 11:
                sent += changed_bytes(rng, _ws_frame(text, first=0x81, mask=mask))
            case 12:
                sent += _ws_frame(b"{}", first=0x81, mask=mask) * 200
            case _:
                sent += _ws_frame(text, first=0x81, mask=mask)
    return sent


def _close_code(answer: bytes) -> int | None:
    """Of the first closing frame among the server's frames."""
    position = answer.find(b"\r\n\r\n") + 4
    while position + 2 <= len(answer):
        opcode, size = answer[position] & 0x0F, answer[position + 1] & 0x7F
        position += 2
        if size == 126:
            size = int.from_bytes(answer[position : position + 2])
            position += 2
        elif size == 127:
            size = int.from_bytes(answer[position : position + 8])
            position += 8
        if opcode == 8:
            return int.from_bytes(answer[position : position + 2]) if size >= 2 else 1005
        position += size
    return None


@asynccontextmanager
async def _websocket() -> AsyncIterator[Run]:
    with watched_log() as log:
        async with _served() as server:

            async def run(rng: random.Random) -> str:
                handshake = changed_bytes(rng, _HANDSHAKE, _INSERTS) if rng.random() < 0.1 else _HANDSHAKE
                async with asyncio.timeout(DEADLINE_S):
                    answer = await _exchange(server, _frames(rng), rng, first=handshake)
                    await server.check()
                check_log(log)
                if not answer.startswith(b"HTTP/1.1 101"):
                    assert not answer.startswith(b"HTTP/1.1 5"), answer[:300]
                    return "no session"
                code = _close_code(answer)
                if code is None:
                    return "goes on"
                assert code in _CLOSED_BY_PROTOCOL, f"closed with {code}"
                return f"closed with {code}"

            yield run


HTTP_BYTES = Target(
    "http bytes", f"{len(REQUESTS)} requests", _http, frozenset({"200", "400", "no answer"}), rounds=60
)
WEBSOCKET_BYTES = Target(
    "websocket bytes",
    "sessions of up to six frames",
    _websocket,
    frozenset({"goes on", "closed with 1002"}),
    rounds=30,
)
