"""One HTTP exchange over a socket of its own, which can be cut at any moment."""

import asyncio
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass

HOST = "127.0.0.1"
_PIECE = 65536


@dataclass(frozen=True)
class Ask:
    """A request, ready to be sent."""

    kind: str
    path: str
    content_type: str
    body: bytes
    sound_mark: bytes | None = None
    """What the body of the answer holds as soon as it holds sound; empty if it is nothing but sound."""


@dataclass(frozen=True)
class Cut:
    """When and how the client leaves."""

    sent_share: float
    """Of the request that is sent before; 1 is all of it."""
    after_s: float
    is_reset: bool
    """With a reset instead of a proper end of the connection."""


@dataclass(frozen=True)
class Reply:
    """What has come until the server or the client ended the connection; times in seconds since the client
    began to connect."""

    status: int | None
    """None if there was none."""
    headers: dict[str, str]
    body: bytes
    is_whole: bool
    was_cut: bool
    """By the client, before the answer was whole."""
    seconds: float
    first_sound_s: float | None


async def exchange(port: int, ask: Ask, request_id: str, timeout_s: float, cut: Cut | None = None) -> Reply:
    """Raises `TimeoutError` if the server neither answers nor ends the connection in time."""
    incoming = _Incoming(ask.sound_mark)
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(HOST, port)
        talking = asyncio.create_task(_talk(reader, writer, _message(ask, request_id), cut, incoming))
        try:
            done, _ = await asyncio.wait({talking}, timeout=None if cut is None else cut.after_s)
            was_cut = not done
            talking.cancel()
            with suppress(asyncio.CancelledError, ConnectionError):
                await talking
            return incoming.reply(was_cut=was_cut)
        finally:
            talking.cancel()
            _close(writer, is_reset=cut is not None and cut.is_reset)


async def _talk(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    message: bytes,
    cut: Cut | None,
    incoming: "_Incoming",
) -> None:
    if cut is not None and cut.sent_share < 1:
        writer.write(message[: int(len(message) * cut.sent_share)])
        await asyncio.sleep(cut.after_s + 1)  # longer than the client stays
        return
    writer.write(message)
    while piece := await reader.read(_PIECE):
        incoming.take(piece)


def _message(ask: Ask, request_id: str) -> bytes:
    head = [
        f"POST {ask.path} HTTP/1.1",
        f"Host: {HOST}",
        f"X-Request-Id: {request_id}",
        f"Content-Type: {ask.content_type}",
        f"Content-Length: {len(ask.body)}",
        "Connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode() + ask.body


def _close(writer: asyncio.StreamWriter, *, is_reset: bool) -> None:
    if is_reset:
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()


class _Incoming:
    def __init__(self, sound_mark: bytes | None) -> None:
        self._sound_mark = sound_mark
        self._began = time.perf_counter()
        self._pieces: list[bytes] = []
        self._first_sound_s: float | None = None

    def take(self, piece: bytes) -> None:
        self._pieces.append(piece)
        if self._sound_mark is not None and self._first_sound_s is None:
            head, _, body = b"".join(self._pieces).partition(b"\r\n\r\n")
            if body and self._sound_mark in body and head.startswith(b"HTTP/1.1 200"):
                self._first_sound_s = time.perf_counter() - self._began

    def reply(self, *, was_cut: bool) -> Reply:
        head, _, rest = b"".join(self._pieces).partition(b"\r\n\r\n")
        status, headers = _parsed(head) if head else (None, {})
        if headers.get("transfer-encoding") == "chunked":
            body, is_whole = _unchunked(rest)
        else:
            body, is_whole = rest, status is not None and len(rest) == int(headers.get("content-length", -1))
        seconds = time.perf_counter() - self._began
        return Reply(status, headers, body, is_whole, was_cut and not is_whole, seconds, self._first_sound_s)


def _parsed(head: bytes) -> tuple[int, dict[str, str]]:
    status, *lines = head.decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in lines)
    return int(status.split()[1]), {name.lower(): value.strip() for name, _, value in fields}


def _unchunked(data: bytes) -> tuple[bytes, bool]:
    """What the chunks hold, and whether the last one is there and nothing behind it."""
    pieces: list[bytes] = []
    at = 0
    while (end := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:end], 16)
        if size == 0:
            return b"".join(pieces), data[end:] == b"\r\n\r\n"
        pieces.append(data[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return b"".join(pieces), False
