"""Callers with a socket of their own, who can leave in the middle of anything."""

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal
from urllib.parse import urlsplit

from tests.faults.supervised_server import ANSWER_TIMEOUT_S

Leave = Literal["FIN", "RST"]
"""Closed in good order, or with a reset, as when the other process was killed with bytes unread."""


def close(connection: socket.socket, how: Leave) -> None:
    if how == "RST":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # socket(7)
    connection.close()


class Caller:
    """One HTTP request, byte by byte."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host = f"{parts.hostname}:{parts.port}"
        self._socket = socket.create_connection((parts.hostname, parts.port), timeout=ANSWER_TIMEOUT_S)
        self._received = b""

    def send(self, path: str, body: bytes, content_type: str = "application/json", part: float = 1.0) -> None:
        """The request, or the first `part` of its body."""
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: {content_type}\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body[: int(len(body) * part)])

    def send_half_a_header(self, path: str) -> None:
        self._socket.sendall(f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Le".encode())

    def post(self, path: str, body: Any) -> None:
        self.send(path, json.dumps(body).encode())

    def until(self, part: bytes) -> None:
        """Returns when `part` has come."""
        while part not in self._received:
            received = self._socket.recv(65536)
            assert received, f"the server has closed the connection: {self._received[-300:]!r}"
            self._received += received

    def leave(self, how: Leave) -> None:
        close(self._socket, how)


@contextmanager
def caller(url: str, how: Leave) -> Iterator[Caller]:
    """Leaves at the end of the block."""
    one = Caller(url)
    try:
        yield one
    finally:
        one.leave(how)


def form(fields: dict[str, str], file: bytes) -> tuple[bytes, str]:
    """A multipart body with a file, and its content type."""
    boundary = "a-boundary-that-no-file-has"
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'
        for k, v in fields.items()
    ]
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    return "".join([*parts, head]).encode() + file + f"\r\n--{boundary}--\r\n".encode(), (
        f"multipart/form-data; boundary={boundary}"
    )
