"""A sound file that is sent while it is made."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress

from fastapi import Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from omni_server.api.disconnect import until_disconnect
from omni_server.api.errors import logged
from omni_server.errors import OmniError

logger = logging.getLogger(__name__)


class AudioStreamResponse(Response):
    """Sends `pieces`, and calls `release` in every case: sent to the end, failed, cancelled, or client gone.

    Where a piece fails, the response is left without its end, upon which the web server closes the connection: the
    client sees that the file is incomplete. A proper end would make it a shorter file that looks whole.
    """

    def __init__(
        self,
        name: str,
        pieces: AsyncGenerator[bytes, None],
        release: Callable[[], Awaitable[None]],
        *,
        media_type: str,
        headers: Mapping[str, str],
    ) -> None:
        """`name` is what the log calls it."""
        super().__init__(media_type=media_type, headers=headers)
        del self.headers["content-length"]
        self._name = name
        self._pieces = pieces
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await until_disconnect(self._send(send), receive)
        finally:
            await self._pieces.aclose()
            await self._release()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for data in self._pieces:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except OmniError as error:
            logger.warning("%s failed while it was sent, its connection is closed: %s", self._name, logged(error))
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})
