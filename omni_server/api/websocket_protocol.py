"""WebSocket connections, as uvicorn serves them, with bounds where it has none."""

from contextlib import suppress

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.frames import CloseCode, Frame

MAX_FRAGMENTS = 65536
"""Of one message. Empty ones would come without end, whatever the limit of bytes is; clients that send 15 MiB of sound
in pieces need some thousand."""


class BoundedWebSocketProtocol(WebSocketsSansIOProtocol):
    """Holds little for a client that floods it, and takes one that has left for just that.

    uvicorn answers every ping, whether the client reads or not: what it does not read would be kept without limit. It
    raises `RuntimeError` to whoever sends on a connection that was closed in the meantime, which is nobody's fault.
    """

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()  # not written: RFC 6455 (5.5.3) lets pongs be left out

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) < MAX_FRAGMENTS:
            super().handle_cont(event)
        elif not self.close_sent:
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, f"more than {MAX_FRAGMENTS} fragments")
            self.handle_parser_exception()

    def send_receive_event_to_app(self) -> None:
        # Text that is none, with the client's close behind it: websockets has answered that when it read it. The close
        # is the next event, and ends the session.
        with suppress(InvalidState):
            super().send_receive_event_to_app()

    async def send(self, message: ASGISendEvent) -> None:
        await self.writable.wait()
        if self.transport.is_closing() or (self.close_sent and self.initial_response is None):
            raise ClientDisconnected
        await super().send(message)
