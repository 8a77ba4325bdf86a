"""Flags of a server that rows of the checklist ask for, and the host that it may read media from."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from tests.integration.server_process import MODEL

KEY, OTHER_KEY = "sk-checklist-first", "sk-checklist-second"
NAME_WITH_SLASH = f"demo/{MODEL}"
SITE = "https://chat.example"
MAX_BODY_BYTES = 1_000_000
MAX_QUEUE = 2


FLAGS = (
    *("--api-key", KEY, OTHER_KEY),
    *("--served-model-name", MODEL, NAME_WITH_SLASH),
    *("--allowed-origins", SITE),
    *("--media-fetch-timeout", "1"),
    *("--max-body-size", str(MAX_BODY_BYTES)),
    *("--max-queue", str(MAX_QUEUE)),
)


class MediaHost:
    """A web server at 127.0.0.1 with a picture, redirects and a path that never answers."""

    SECRET = "what only this host knows"

    def __init__(self) -> None:
        self.paths: list[str] = []
        """All that it was asked for."""
        self._stopping = threading.Event()
        host = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                host.paths.append(self.path)
                if self.path == "/never":
                    host._stopping.wait()
                    return
                target = self.path.partition("?to=")[2]
                self.send_response(302 if target else 200)
                if target:
                    self.send_header("Location", target)
                self.send_header("Content-Length", str(len(host.SECRET)))
                self.end_headers()
                self.wfile.write(host.SECRET.encode())

            def log_message(self, format: str, *args: object) -> None:
                """Nothing to standard error."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
