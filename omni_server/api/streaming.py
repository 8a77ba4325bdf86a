"""Responses that are sent while they are made, and work that ends when the client leaves."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
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
"""A comment: OpenAI's client skips it, while it fails on a frame without data."""

_LINE_BREAKS = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
"""JSON may hold these as they are, but clients that cut the stream with `str.splitlines`, as httpx does,
would cut a frame in two."""


async def until_disconnect(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Awaits `work`, and cancels it when the client disconnects; raises `ClientDisconnect` then.

    The body must have been read. Where `work` returns all the same, its result is returned: it may contain
    something that its receiver has to release. The calling task does the work itself: in a task of its own,
    every request of a burst would wait for one more turn of the event loop.
    """
    left = asyncio.timeout(None)  # as a scope that the other task can cancel

    async def watch() -> None:
        with suppress(Exception):  # the connection is of no use then, either
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
    """One server-sent event, on one line. Fields that were never set are left out."""
    return b"data: " + _on_one_line(data.model_dump_json(exclude_unset=True)) + b"\n\n"


class FrameTemplate:
    """Frames that differ in one string only, without the cost of a model for each."""

    def __init__(self, make: Callable[[str], BaseModel]) -> None:
        """`make` puts a string into the model; it must be the last one of its value."""
        marker = "the string"
        before, found, after = frame(make(marker)).rpartition(to_json(marker))
        assert found
        self._before, self._after = before, after

    def frame(self, text: str) -> bytes:
        """The same as `frame(make(text))`."""
        return self._before + _on_one_line(to_json(text).decode()) + self._after


def _on_one_line(json: str) -> bytes:
    return (json if json.isascii() else json.translate(_LINE_BREAKS)).encode()


class StreamResponse(Response):
    """Sends `first` and `pieces`. In every case (sent to the end, failed, cancelled, client gone) it closes
    `pieces` and calls `release`."""

    failure_level = logging.INFO
    failure_line = "%s failed while it was streamed: %s"
    """What the log says of a failure that was foreseen."""

    def __init__(
        self,
        name: str,
        pieces: AsyncGenerator[bytes, None],
        *,
        first: bytes = b"",
        release: Callable[[], Awaitable[None]] | None = None,
        media_type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`name` is what the log calls it. `first` is the piece that was made before the status was sent.
        Empty pieces are not sent."""
        # "no" keeps nginx from collecting the stream.
        common = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(media_type=media_type, headers={**(headers or {}), **common})
        del self.headers["content-length"]
        self._name = name
        self._first = first
        self._pieces = pieces
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await until_disconnect(self._send(send), receive)
        finally:
            await self._pieces.aclose()
            if self._release is not None:
                await self._release()

    def ending(self, error: OmniError) -> bytes | None:
        """The last piece where `error` came up; None leaves the response without its end."""
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
    """Server-sent events. Where they fail, the last one contains the error."""

    media_type = "text/event-stream"

    def ending(self, error: OmniError) -> bytes:
        return frame(envelope(error))


class AudioStreamResponse(StreamResponse):
    """An audio file that is sent while it is made.

    Where it fails, the response is left without its end, upon which the web server closes the connection: the
    client sees that the file is incomplete. A proper end would make it a shorter file that looks whole.
    """

    failure_level = logging.WARNING
    failure_line = "%s failed while it was sent, its connection is closed: %s"

    def ending(self, error: OmniError) -> None:
        """None."""
