"""Limits on concurrent requests, on the size of request heads, and on the size, upload time and total memory
of request bodies."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_server.api.config import ApiConfig
from omni_server.api.errors import error_response
from omni_server.api.memory_budget import MemoryBudget
from omni_server.api.request_record import ANONYMOUS, current_request, path_of
from omni_server.api.server_metrics import ServerMetrics
from omni_server.api.state import ServerState
from omni_server.errors import (
    HeadersTooLargeError,
    InvalidRequestError,
    OverloadedError,
    RateLimitError,
    RequestTooLargeError,
    UploadTimeoutError,
    UrlTooLongError,
)

MAX_RETRY_AFTER_S = 5
_COUNTED_PATHS = ("/v1/", "/tokenize", "/detokenize")
_WEIGHT = 0.1
"""Of the latest request in the mean duration."""
_FIELD_OVERHEAD = 4
"""Bytes: the colon, the space and the line end of a header field."""
_BODY_HEADERS = frozenset({"content-length", "transfer-encoding"})
LINGER_S = 10.0
"""How long a client may continue to send its body after an early response. The server drops the data:
closing immediately would reset the connection, and the client might lose the response."""


class HeadLimitMiddleware:
    """Bounds the URL and the headers. The web server bounds them while they arrive."""

    def __init__(self, app: ASGIApp, config: ApiConfig) -> None:
        self.app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if error is not None:
            await error_response(error)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> InvalidRequestError | None:
        num_url_bytes = len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"]) + 1
        fields = scope["headers"]
        num_bytes = num_url_bytes + sum(len(name) + len(value) + _FIELD_OVERHEAD for name, value in fields)
        if num_url_bytes > self._config.max_url_bytes:
            return url_too_long(self._config)
        if num_bytes > self._config.max_header_bytes:
            return headers_too_large(self._config)
        if len(fields) > self._config.max_header_fields:
            return HeadersTooLargeError(
                f"The request has more than the {self._config.max_header_fields} header fields accepted."
            )
        return None


def url_too_long(config: ApiConfig) -> UrlTooLongError:
    return UrlTooLongError(f"The URL is longer than the {config.max_url_bytes} bytes accepted.")


def headers_too_large(config: ApiConfig) -> HeadersTooLargeError:
    return HeadersTooLargeError(
        f"The request's headers are larger than the {config.max_header_bytes} bytes accepted."
    )


class LingerMiddleware:
    """Receives the rest of a body that was not needed for the response, and drops it. After a time the web
    server closes the connection."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _BODY_HEADERS.isdisjoint(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        is_complete = False

        async def receive_body() -> Message:
            nonlocal is_complete
            message = await receive()
            is_complete = not message.get("more_body", False)  # or the client has left
            return message

        async def send_before_rest(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if not is_last or is_complete:
                await send(message)
                return
            await send({**message, "more_body": True})
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    while not is_complete:
                        await receive_body()
            await send({"type": "http.response.body"})

        await self.app(scope, receive_body, send_before_rest)


class Admission:
    """Counts concurrent requests and sessions. Belongs to one event loop."""

    def __init__(
        self,
        metrics: ServerMetrics,
        *,
        max_queue: int,
        max_per_caller: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """0 means no limit; keyless callers have no limit of their own."""
        self._metrics = metrics
        self._max_queue = max_queue
        self._max_per_caller = max_per_caller
        self._clock = clock
        self.num_in_flight = 0
        self._of_caller: Counter[str] = Counter()
        self._mean_s = 1.0
        metrics.limit.set(max_queue)

    def check_room(self) -> None:
        """Raises `OverloadedError` if the next request would be refused."""
        if 0 < self._max_queue <= self.num_in_flight:
            raise OverloadedError(
                f"The server is at its limit of {self._max_queue} requests at a time; try again later."
            )

    def enter(self, caller: str) -> Callable[[], None]:
        """Takes a slot; returns its release callback. Raises `OverloadedError` or `RateLimitError`."""
        try:
            self.check_room()
        except OverloadedError:
            self._metrics.rejected("max_queue")
            raise
        if caller != ANONYMOUS and 0 < self._max_per_caller <= self._of_caller[caller]:
            self._metrics.rejected("max_concurrency_per_key")
            raise RateLimitError(
                f"This API key is at its limit of {self._max_per_caller} requests at a time; try again later."
            )
        began = self._clock()
        self._count(caller, 1)

        def leave() -> None:
            self._count(caller, -1)
            self._mean_s += _WEIGHT * (self._clock() - began - self._mean_s)

        return leave

    def enter_choices(self, number: int, param: str = "n") -> None:
        """Takes a slot for each choice of the current request beyond the first; they are released when it
        ends. `param` is the request's field that they come from.

        Raises `OverloadedError`, `RateLimitError`, or `InvalidRequestError` if `number` exceeds a limit.
        """
        record = current_request()
        assert record is not None
        own = 0 if record.caller == ANONYMOUS else self._max_per_caller
        most = min((limit for limit in (self._max_queue, own) if limit > 0), default=number)
        if number > most:
            raise InvalidRequestError(
                f"Invalid '{param}': {number} choices are more than the {most} requests that this server takes "
                "at a time: each choice is one.",
                param=param,
                code="integer_above_max_value",
            )
        for _ in range(number - 1):
            record.places.callback(self.enter(record.caller))

    def retry_after_s(self) -> int:
        """Expected whole seconds until a slot becomes free, from 1 to `MAX_RETRY_AFTER_S`."""
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(self._mean_s / max(1, self.num_in_flight))))

    def _count(self, caller: str, change: int) -> None:
        self.num_in_flight += change
        self._of_caller[caller] += change
        if self._of_caller[caller] == 0:
            del self._of_caller[caller]
        self._metrics.in_flight.set(self.num_in_flight)


class AdmissionMiddleware:
    """Takes a slot for each POST and WebSocket under `_COUNTED_PATHS`, from before the body is read until it
    ends; slots for further choices are taken when their number is known. HTTP requests under it, including
    streams, count as in flight while they run."""

    def __init__(self, app: ASGIApp, admission: Admission, state: ServerState) -> None:
        self.app = app
        self._admission = admission
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not path_of(scope).startswith(_COUNTED_PATHS):
            await self.app(scope, receive, send)
            return
        record = current_request()
        assert record is not None
        with record.places as places:
            if scope["type"] == "websocket" or scope["method"] == "POST":
                try:
                    places.callback(self._admission.enter(record.caller))
                except (OverloadedError, RateLimitError) as error:
                    headers = {"retry-after": str(self._admission.retry_after_s())}
                    await error_response(error, headers)(scope, receive, send)
                    return
            if scope["type"] == "http":
                # Sessions count their own answers: an open session does not delay the shutdown.
                places.enter_context(self._state.request_in_flight())
            await self.app(scope, receive, send)


class BodyLimitMiddleware:
    """Bounds the size and upload time of every request body, and the total size of all bodies.

    `receive` raises `RequestTooLargeError`, `UploadTimeoutError` or `OverloadedError` while the route reads
    the body. A body counts until its response begins or its request ends: it is kept while media are
    decoded and a whole answer is generated.
    """

    def __init__(self, app: ASGIApp, config: ApiConfig, metrics: ServerMetrics) -> None:
        self.app = app
        self._config = config
        self._memory = MemoryBudget(
            config.max_total_body_bytes,
            0,
            f"The bodies of all requests together are larger than the {config.max_total_body_bytes} bytes "
            "that this server holds at a time; try again later.",
        )
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        max_bytes = self._config.max_body_bytes
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
            await error_response(_too_large(max_bytes))(scope, receive, send)
            return
        body = _BoundedBody(receive, self._config, self._memory, self._metrics)
        record = current_request()
        assert record is not None
        record.on_response.append(body.release)
        record.hold_memory = body.hold
        try:
            await self.app(scope, body, send)
        finally:
            body.release()


class _BoundedBody:
    def __init__(
        self, receive: Receive, config: ApiConfig, memory: MemoryBudget, metrics: ServerMetrics
    ) -> None:
        self._receive = receive
        self._config = config
        self._memory = memory
        self._metrics = metrics
        self._deadline: float | None = None
        self._num_bytes = 0
        self._is_complete = False
        self._is_released = False

    async def __call__(self) -> Message:
        if self._is_complete:
            return await self._receive()
        timeout_s = self._config.body_timeout_s
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise UploadTimeoutError(
                f"The request body did not arrive within the {timeout_s:g} s that this server waits."
            ) from None
        self._is_complete = not message.get("more_body", False)
        num_new = len(message.get("body", b""))
        if self._num_bytes + num_new > self._config.max_body_bytes:
            raise _too_large(self._config.max_body_bytes)
        await self.hold(num_new)
        return message

    async def hold(self, num_bytes: int) -> None:
        if not self._is_released:  # after an early response, the rest of the body is not kept
            try:
                await self._memory.acquire(num_bytes)
            except OverloadedError:
                self._metrics.rejected("max_total_body_size")
                raise
        self._num_bytes += num_bytes

    def release(self) -> None:
        """Releases the body's bytes. Idempotent."""
        if not self._is_released:
            self._is_released = True
            self._memory.release(self._num_bytes)


def _too_large(max_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"The request body is larger than the {max_bytes} bytes that this server accepts."
    )
