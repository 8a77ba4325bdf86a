"""WebSocket frames that no client library sends. All of them were found by changing frames
at random."""

import asyncio
import logging
import socket
import struct
from collections.abc import AsyncIterator

import pytest

from omni_server.api.websocket_protocol import MAX_FRAGMENTS
from tests.unit.api.clients import URL, chat
from tests.unit.api.test_server import Life, client_of, served

HANDSHAKE = (
    b"GET /v1/realtime?model=omni HTTP/1.1\r\nhost: localhost\r\n"
    b"upgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
MASK = bytes(4)
TEXT, CONTINUATION, CLOSE, PING, FINAL = 0x01, 0x00, 0x08, 0x09, 0x80
DEADLINE_S = 60.0


def frame(payload: bytes, first: int) -> bytes:
    return struct.pack("!BB", first, 0x80 | len(payload)) + MASK + payload


@pytest.fixture
async def life(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Life]:
    """A server that serves on, and has logged no error, whatever was sent."""
    life = Life()
    async with served(life):
        yield life
        async with client_of(life.address) as client:
            assert (await client.post(URL, json=chat())).status_code == 200
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def begun(
    life: Life, connection: socket.socket | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = life.address.removeprefix("http://").partition(":")
    if connection is None:
        reader, writer = await asyncio.open_connection(host, int(port))
    else:
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=connection)
    writer.write(HANDSHAKE)
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def test_text_that_is_none_ends_the_session_and_not_the_peace_of_the_log(life: Life) -> None:
    reader, writer = await begun(life)
    writer.write(frame(b"\xff", TEXT | FINAL))
    answer = await asyncio.wait_for(reader.read(), DEADLINE_S)
    assert answer.endswith(struct.pack("!BBH", 0x88, 2, 1007))
    writer.close()


async def test_text_that_is_none_may_come_together_with_the_clients_farewell(life: Life) -> None:
    reader, writer = await begun(life)
    writer.write(frame(b"\xff", TEXT | FINAL) + frame(struct.pack("!H", 1000), CLOSE | FINAL))
    answer = await asyncio.wait_for(reader.read(), DEADLINE_S)
    assert answer.endswith(struct.pack("!BBH", 0x88, 2, 1000))
    writer.close()


async def test_a_client_that_leaves_at_any_moment_leaves_no_trace_in_the_log(life: Life) -> None:
    for num_bytes in (len(HANDSHAKE) - 1, len(HANDSHAKE), len(HANDSHAKE), len(HANDSHAKE)):
        host, _, port = life.address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(HANDSHAKE[:num_bytes])
        await asyncio.sleep(0.02)
        reader, writer = await begun(life)
        # Told to be closed, while the server still has to say something.
        writer.write(frame(b'{"type": "response.create"}', TEXT | FINAL) * 20 + frame(b"\x03\xe8", 0x88))
        await asyncio.wait_for(reader.read(), DEADLINE_S)
        writer.close()


async def test_a_message_of_endless_fragments_is_ended(life: Life) -> None:
    """Empty ones count for no limit of bytes."""
    reader, writer = await begun(life)
    writer.write(frame(b"", TEXT) + frame(b"", CONTINUATION) * (MAX_FRAGMENTS + 1))
    answer = await asyncio.wait_for(reader.read(), DEADLINE_S)
    assert struct.pack("!H", 1009) + f"more than {MAX_FRAGMENTS} fragments".encode() in answer
    writer.close()


async def test_pongs_are_not_kept_for_a_client_that_does_not_read(life: Life) -> None:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    connection.setblocking(False)
    reader, writer = await begun(life, connection)
    flood = frame(b"x" * 125, FINAL | PING) * 1_000
    num_sent = 0
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    while num_sent < 16_000_000:
        writer.write(flood)
        await asyncio.wait_for(writer.drain(), DEADLINE_S)
        num_sent += len(flood)
    writer.transport.resume_reading()  # type: ignore[attr-defined]
    writer.write(frame(b"\x03\xe8", 0x88))
    num_read = 0
    async with asyncio.timeout(DEADLINE_S):
        while piece := await reader.read(1 << 20):
            num_read += len(piece)
    assert num_read < num_sent / 2
    writer.close()
