"""The curl program as the rows of the checklist use it, and raw sockets for what curl would not send."""

import json
import socket
import subprocess
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import httpx2

TIMEOUT_S = 120


class Curl:
    """Runs curl against one server, with or without an API key."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url
        # The first, which has to be the first, keeps the settings of whoever runs the tests out.
        self._options = [
            "--disable",
            "--noproxy",
            "*",
            "--silent",
            "--show-error",
            "--max-time",
            str(TIMEOUT_S),
        ]
        if key is not None:
            self._options += ["--header", f"Authorization: Bearer {key}"]

    def get(self, path: str, *options: str) -> httpx2.Response:
        return self._response(path, options)

    def post(
        self, path: str, body: Any, *options: str, content_type: str = "application/json"
    ) -> httpx2.Response:
        """`body` as JSON, or as it is if it is bytes."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._response(path, [*_posting(content_type), *options], sent)

    def _response(self, path: str, options: Any, sent: bytes = b"") -> httpx2.Response:
        finished = self._run(path, ["--include", *options], sent)
        assert finished.returncode == 0, finished.stderr.decode()
        head, _, content = finished.stdout.partition(b"\r\n\r\n")
        while head.split(b" ", 2)[1] == b"100":
            head, _, content = content.partition(b"\r\n\r\n")
        status_line, *lines = head.decode("latin-1").split("\r\n")
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        return httpx2.Response(int(status_line.split()[1]), headers=headers, content=content)

    def _run(self, path: str, options: Any, sent: bytes) -> "subprocess.CompletedProcess[bytes]":
        command = ["curl", *self._options, *options, self.url + path]
        return subprocess.run(command, input=sent, capture_output=True, check=False)


def _posting(content_type: str) -> tuple[str, ...]:
    return ("--data-binary", "@-", "--header", f"Content-Type: {content_type}")


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    assert address.hostname is not None
    return socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_S)


def answer(raw: socket.socket) -> HTTPResponse:
    """The next answer on the connection, read to its end."""
    response = HTTPResponse(raw)
    response.begin()
    response.read()
    return response
