"""A server with the flags that rows of the checklist ask for, and the host that it may read media from."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.integration.server_process import MODEL, ServerProcess

KEY, OTHER_KEY = "sk-checklist-first", "sk-checklist-second"
NAME_WITH_SLASH = f"demo/{MODEL}"
SITE = "https://chat.example"
MAX_BODY_BYTES = 1_000_000
MAX_QUEUE = 2


class GuardedServers:
    """One server after another: a row ends the first by SIGTERM, and if others follow, they get a new one."""

    FLAGS = (
        *("--api-key", KEY, OTHER_KEY),
        *("--served-model-name", MODEL, NAME_WITH_SLASH),
        *("--allowed-origins", SITE),
        *("--media-fetch-timeout", "1"),
        *("--max-body-size", str(MAX_BODY_BYTES)),
        *("--max-queue", str(MAX_QUEUE)),
        *("--shutdown-timeout", "120"),
    )

    def __init__(self, checkpoint: Path, folder: Path, media_host: "MediaHost") -> None:
        self._checkpoint = checkpoint
        self._flags = (*self.FLAGS, "--allowed-media-domains", f"127.0.0.1:{media_host.port}")
        self._folder = folder
        self._started: list[ServerProcess] = []

    def running(self) -> ServerProcess:
        if not self._started or self._started[-1].process.poll() is not None:
            log = self._folder / f"log{len(self._started)}.txt"
            self._started.append(ServerProcess(self._checkpoint, log, *self._flags))
        return self._started[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for server in self._started:
            exit_code = server.process.poll() if server.process.poll() is not None else server.terminate()
            assert exit_code == 0, server.log
            assert "Traceback" not in server.log


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
