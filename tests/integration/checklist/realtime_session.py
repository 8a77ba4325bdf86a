"""A WebSocket to `/v1/realtime` that checks every event it gets."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from websockets.sync.client import ClientConnection, connect

from tests.integration.server_process import MODEL
from tests.integration.test_realtime import ATTEMPTS, check_talker_ended_at_once
from tests.unit.api.realtime.realtime_client import Event, base64_of, check_event

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

    def play(self, samples: npt.NDArray[np.int16]) -> None:
        """At 24 kHz, in pieces of 100 ms."""
        for begin in range(0, len(samples), 2400):
            self.send("input_audio_buffer.append", audio=base64_of(samples[begin : begin + 2400].tobytes()))

    def response(self, **overrides: Any) -> list[Event]:
        """The events of a response from `response.created` to `response.done`."""
        first = len(self.events)
        self.send("response.create", response=overrides)
        self.until("response.done")
        return self.events[first:]

    def answer(self, **overrides: Any) -> list[Event]:
        """A response that says something, of several attempts."""
        for _ in range(ATTEMPTS):
            events = self.response(**overrides)
            if any(event["type"] in SAID for event in events):
                return events
            response = events[-1]["response"]
            if response["output_modalities"] == ["audio"]:
                check_talker_ended_at_once(response)
            else:
                assert response["usage"]["output_token_details"]["text_tokens"] <= 1, response
        raise AssertionError(f"{ATTEMPTS} responses say nothing")

    def begin(self) -> str:
        """The id of a response of which the first sound has come."""
        for _ in range(ATTEMPTS):
            self.send("response.create")
            event = self.until("response.output_audio.delta", "response.done")
            if event["type"] == "response.output_audio.delta":
                response_id: str = event["response_id"]
                return response_id
            check_talker_ended_at_once(event["response"])
        raise AssertionError(f"{ATTEMPTS} responses have no sound")

    def refused(self, kind: str, **fields: Any) -> Event:
        """The error that an event gets; it names the event."""
        self.send(kind, event_id="mine", **fields)
        error: Event = self.until("error")["error"]
        assert error["event_id"] == "mine"
        return error


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
