"""What surrounds every request. Plain ASGI, so that streams and disconnects pass through untouched."""

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_server.api.errors import error_response, unexpected_error
from omni_server.api.state import ServerState

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class RequestIdMiddleware:
    """Puts `x-request-id` on every response: the caller's if it is well-formed, else a new one.

    It is outermost, and turns an exception that nobody foresaw into a 500 itself, because Starlette's own
    handler for those stands outside of all middleware and its answer would lack the id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        response_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal response_started
            if message["type"] == "http.response.start":
                response_started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception:
            if response_started:
                raise  # the web server logs it and cuts the connection
            logger.exception("request %s failed", request_id)
            await error_response(unexpected_error())(scope, receive, send_with_id)


class InFlightMiddleware:
    """Counts the requests under `/v1/`, streamed answers included, for as long as they run."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self.app = app
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self.app(scope, receive, send)
            return
        with self.state.request_in_flight():
            await self.app(scope, receive, send)
