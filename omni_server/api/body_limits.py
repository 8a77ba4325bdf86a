"""Limits on the bodies of requests: size, time to arrive, and memory of all together."""

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_server.api.errors import error_response
from omni_server.api.request_record import current_request
from omni_server.errors import OverloadedError, RequestTooLargeError, UploadTimeoutError
from omni_server.metrics.server_metrics import ServerMetrics


class BodyBudget:
    """Counts the bytes of all bodies that are held at the same time. Belongs to one event loop."""

    def __init__(self, metrics: ServerMetrics, max_bytes: int) -> None:
        self._metrics = metrics
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises `OverloadedError`, and has taken nothing then."""
        if self._num_bytes + num_bytes > self._max_bytes:
            self._metrics.rejected("max_total_body_size")
            raise OverloadedError(
                f"The bodies of all requests together are larger than the {self._max_bytes} bytes that this server "
                "holds at a time; try again later."
            )
        self._num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes


class BodyLimitMiddleware:
    """Bounds the size of every request body, the time that it takes to arrive, and the size of all together.

    `receive` raises `RequestTooLargeError`, `UploadTimeoutError` or `OverloadedError` where the route reads the body.
    A body counts until its response begins or its request ends: it is kept while its media are read, and a whole
    answer is made.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float, budget: BodyBudget) -> None:
        self.app = app
        self._budget = budget
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > self._max_bytes:
            await error_response(_too_large(self._max_bytes))(scope, receive, send)
            return
        body = _BoundedBody(receive, self._max_bytes, self._timeout_s, self._budget)
        record = current_request()
        assert record is not None
        record.on_response.append(body.release)
        try:
            await self.app(scope, body, send)
        finally:
            body.release()


class _BoundedBody:
    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float, budget: BodyBudget) -> None:
        self._receive = receive
        self._budget = budget
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        self._num_bytes = 0
        self._num_taken = 0
        self._is_complete = False
        self._is_released = False

    async def __call__(self) -> Message:
        if self._is_complete:
            return await self._receive()
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise UploadTimeoutError(
                f"The request body did not arrive within the {self._timeout_s:g} s that this server waits."
            ) from None
        self._num_bytes += len(message.get("body", b""))
        self._is_complete = not message.get("more_body", False)
        if self._num_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        self._take(len(message.get("body", b"")))
        return message

    def _take(self, num_bytes: int) -> None:
        if self._is_released:  # answered before it was read: nobody keeps the rest
            return
        self._budget.take(num_bytes)
        self._num_taken += num_bytes

    def release(self) -> None:
        """The body is needed no more; may be called again."""
        if not self._is_released:
            self._is_released = True
            self._budget.give_back(self._num_taken)


def _too_large(max_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"The request body is larger than the {max_bytes} bytes that this server accepts.")
