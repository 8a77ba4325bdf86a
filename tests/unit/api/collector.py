"""A collector of traces: OTLP over HTTP, in a thread."""

import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """`with Collector() as collector:` takes spans at `collector.url` until the end of the block."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resource: dict[str, object] = {}
        self.raw = b""
        """All that was sent."""
        self.asked = threading.Event()
        self.answers = threading.Event()
        """Cleared, the collector takes connections and requests, and says nothing."""
        self.answers.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(poll_interval=0.02))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def __enter__(self) -> "Collector":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.answers.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def wait_for(self, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not is_there():
            assert time.monotonic() < deadline, [span.name for span in self.spans]
            time.sleep(0.05)

    def _take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces"
        self.raw += body
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = {pair.key: value_of(pair.value) for pair in group.resource.attributes}
            for scope in group.scope_spans:
                self.spans += scope.spans

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.asked.set()
                if not collector.answers.is_set():
                    collector.answers.wait()
                    self.close_connection = True
                    return
                collector._take(self.path, body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


def attributes(span: Span) -> Mapping[str, object]:
    return {pair.key: value_of(pair.value) for pair in span.attributes}


def value_of(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return [value_of(entry) for entry in value.array_value.values]
    found: object = getattr(value, kind)
    return found
