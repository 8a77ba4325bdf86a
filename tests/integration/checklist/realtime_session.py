"""A WebSocket to `/v1/realtime` that checks every event it gets."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.integration.server_process import MODEL
from tests.unit.api.realtime.realtime_client import Event, check_event

TIMEOUT_S = 120
SAID = ("response.output_text.delta", "response.output_audio.delta")
MANUAL = {"input": {"turn_detection": None}}


class Session:
    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.events: list[Event] = []
        self._ids: set[str] = set()

    def send(self, kind: str, **fields: Any) -> None:
        self.socket.send(json.dumps({"type": kind, **fields}))

    def next(self) -> Event:
        event: Event = json.loads(self.socket.recv(TIMEOUT_S))
        check_event(event, self._ids)
        self.events.append(event)
        return event

    def until(self, *kinds: str) -> Event:
        """Reads up to the next event of one of the types; another error on the way is a failure."""
        while True:
            event = self.next()
            if event["type"] in kinds:
                return event
            assert event["type"] != "error", event

    def configure(self, **session: Any) -> Event:
        self.send("session.update", session={"type": "realtime", **session})
        effective: Event = self.until("session.updated")["session"]
        return effective

    def say(self, text: str) -> str:
        content = [{"type": "input_text", "text": text}]
        self.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        item_id: str = self.until("conversation.item.done")["item"]["id"]
        return item_id

    def response(self, **overrides: Any) -> list[Event]:
        """The events of a response from `response.created` to `response.done`."""
        first = len(self.events)
        self.send("response.create", response=overrides)
        self.until("response.done")
        return self.events[first:]


@contextmanager
def session_of(url: str, query: str = f"?model={MODEL}", **options: Any) -> Iterator[Session]:
    """Connected to the server at `url`, before its first event."""
    address = f"{url.replace('http', 'ws', 1)}/v1/realtime{query}"
    with connect(address, max_size=None, compression=None, proxy=None, **options) as socket:
        yield Session(socket)


@contextmanager
def opened(url: str, **session: Any) -> Iterator[Session]:
    """After its first event, configured if fields are given."""
    with session_of(url) as talk:
        talk.until("session.created")
        if session:
            talk.configure(**session)
        yield talk
