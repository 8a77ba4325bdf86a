"""Streaming responses, and work that is cancelled when the client disconnects."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

from fastapi import Response
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from omni_server.api.errors import envelope, logged, unexpected_error
from omni_server.errors import OmniError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: OpenAI's client skips it, but fails on a frame without data."""

_LINE_BREAKS = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
"""JSON allows these unescaped, but clients that split the stream with `str.splitlines`, as httpx does,
would split the frame."""


async def until_disconnect(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Awaits `work`; if the client disconnects, cancels it and raises `ClientDisconnect`.

    The body must have been read. If `work` returns despite the cancellation, its result is returned, because
    it may hold resources that the caller must release. `work` runs in the calling task: a separate task would
    cost each request of a burst another turn of the event loop.
    """
    left = asyncio.timeout(None)  # a scope that the other task can cancel

    async def watch() -> None:
        with suppress(Exception):  # the connection is unusable then, too
            while (await receive())["type"] != "http.disconnect":
                continue
        left.reschedule(asyncio.get_running_loop().time())

    watching = asyncio.create_task(watch())
    try:
        async with left:
            return await work
    except TimeoutError:
        if left.expired():
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()


def frame(data: BaseModel) -> bytes:
    """Renders one server-sent event on one line. Omits unset fields."""
    return b"data: " + _on_one_line(data.model_dump_json(by_alias=True, exclude_unset=True)) + b"\n\n"


def named_frame(event: str, data: BaseModel) -> bytes:
    """Like `frame`, with the event's name on a line of its own."""
    return b"event: " + event.encode() + b"\n" + frame(data)


class FrameTemplate:
    """Renders frames that differ only in one string, without a model for each."""

    def __init__(self, make: Callable[[str], BaseModel]) -> None:
        """`make` puts a string into a model; it must be the last occurrence there."""
        marker = "the string"
        before, found, after = frame(make(marker)).rpartition(to_json(marker))
        assert found
        self._before, self._after = before, after

    def frame(self, text: str) -> bytes:
        """Same as `frame(make(text))`."""
        return self._before + _on_one_line(to_json(text).decode()) + self._after


def _on_one_line(json: str) -> bytes:
    return (json if json.isascii() else json.translate(_LINE_BREAKS)).encode()


class StreamResponse(Response):
    """Sends `first` and `pieces`. Always closes `pieces` and then `held`, also after a failure, a
    cancellation or a disconnect."""

    failure_level = logging.INFO
    failure_line = "%s failed while it was streamed: %s"
    """Log text for an `OmniError`."""

    def __init__(
        self,
        name: str,
        pieces: AsyncGenerator[bytes, None],
        *,
        first: bytes = b"",
        held: AsyncExitStack | None = None,
        media_type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`name` identifies it in the log. `first` is a piece that was made before the status is sent. Empty
        pieces are skipped."""
        # "no" keeps nginx from buffering the stream.
        common = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(media_type=media_type, headers={**(headers or {}), **common})
        if headers is None or "content-length" not in headers:
            del self.headers["content-length"]
        self._name = name
        self._first = first
        self._pieces = pieces
        self._held = held or AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await until_disconnect(self._send(send), receive)
        finally:
            async with self._held:
                await self._pieces.aclose()

    def ending(self, error: OmniError) -> bytes | None:
        """The last piece after `error`; None leaves the response incomplete."""
        raise NotImplementedError

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last: bytes | None = b""
        try:
            if self._first:
                await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for data in self._pieces:
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except ClientDisconnect:
            raise
        except OmniError as error:
            logger.log(self.failure_level, self.failure_line, self._name, logged(error))
            last = self.ending(error)
        except Exception:
            logger.exception("%s failed while it was streamed", self._name)
            last = self.ending(unexpected_error())
        if last is not None:
            await send({"type": "http.response.body", "body": last, "more_body": False})


class EventStreamResponse(StreamResponse):
    """Server-sent events. After a failure, the last one contains the error."""

    media_type = "text/event-stream"

    def ending(self, error: OmniError) -> bytes:
        return frame(envelope(error))


class AudioStreamResponse(StreamResponse):
    """An audio file that is sent while it is generated.

    After a failure, the response is left incomplete and the web server closes the connection, so the client
    sees that the file is truncated. A proper end would make it look like a complete, shorter file.
    """

    failure_level = logging.WARNING
    failure_line = "%s failed while it was sent, its connection is closed: %s"

    def ending(self, error: OmniError) -> None:
        """None."""
