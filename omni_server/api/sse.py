"""Server-sent events over ASGI."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress

from fastapi import Response
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from omni_server.api.disconnect import until_disconnect
from omni_server.api.errors import envelope, logged, unexpected_error
from omni_server.errors import OmniError

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: OpenAI's client skips it, while it fails on a frame without data."""


_LINE_BREAKS = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
"""JSON may hold these as they are, but clients that cut the stream with `str.splitlines`, as httpx does, would
cut a frame in two."""


def frame(data: BaseModel) -> bytes:
    """One event, on one line. Fields that were never set are left out."""
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


class EventStreamResponse(Response):
    """Sends `frames`, and calls `release` in every case: sent to the end, failed, cancelled, or client gone.

    Where `frames` fail, the last one holds the error.
    """

    media_type = "text/event-stream"

    def __init__(self, name: str, frames: AsyncGenerator[bytes, None], release: Callable[[], Awaitable[None]]) -> None:
        """`name` is what the log calls it. Frames that are empty are not sent."""
        # The second header keeps nginx from collecting the stream.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._name = name
        self._frames = frames
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await until_disconnect(self._send(send), receive)
        finally:
            await self._frames.aclose()
            await self._release()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = b""
        try:
            async for data in self._frames:
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except ClientDisconnect:
            raise
        except OmniError as error:
            logger.info("%s failed while it was streamed: %s", self._name, logged(error))
            last = frame(envelope(error))
        except Exception:
            logger.exception("%s failed while it was streamed", self._name)
            last = frame(envelope(unexpected_error()))
        await send({"type": "http.response.body", "body": last, "more_body": False})
