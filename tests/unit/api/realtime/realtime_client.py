"""A WebSocket client of `/v1/realtime` without a socket, which checks every event that it gets."""

import asyncio
import base64
import json
import warnings
from collections.abc import MutableMapping
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from omni_server.api.config import ApiConfig
from omni_server.api.errors import install_error_handlers
from omni_server.api.media_loader import MediaLoader
from omni_server.api.realtime.router import realtime_router
from omni_server.api.realtime.vad import SpeechModel
from omni_server.api.state import ServerState
from tests.unit.api.fake_generator import FakeGenerator

ALLOWED = {
    "error", "session.created", "session.updated", "conversation.created",
    "input_audio_buffer.committed", "input_audio_buffer.cleared",
    "input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped",
    "conversation.item.added", "conversation.item.done", "conversation.item.truncated",
    "conversation.item.deleted", "conversation.item.retrieved",
    "conversation.item.input_audio_transcription.delta",
    "conversation.item.input_audio_transcription.completed",
    "conversation.item.input_audio_transcription.failed",
    "response.created", "response.done", "response.output_item.added", "response.output_item.done",
    "response.content_part.added", "response.content_part.done",
    "response.output_text.delta", "response.output_text.done",
    "response.output_audio_transcript.delta", "response.output_audio_transcript.done",
    "response.output_audio.delta", "response.output_audio.done",
    "response.function_call_arguments.delta", "response.function_call_arguments.done", "rate_limits.updated",
}  # fmt: skip
"""What clients know; some end at any other type."""

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _SCHEMA: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)

Event = dict[str, Any]


class ScriptedModel:
    """Hears speech in frames that are louder than a whisper."""

    def probability(self, frame: npt.NDArray[np.float32]) -> float:
        return 1.0 if float(np.abs(frame).max()) > 0.05 else 0.0


def realtime_app(
    state: ServerState, config: ApiConfig | None = None, model: type[SpeechModel] = ScriptedModel
) -> Any:
    """The route alone, with another detector of speech than the real one."""
    app = FastAPI()
    install_error_handlers(app)
    config = config if config is not None else ApiConfig()
    app.include_router(realtime_router(state, config, MediaLoader(config), model))
    return app


class Closed(Exception):
    """The server has closed the connection."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code} {reason}")
        self.code = code
        self.reason = reason


class Refused(Exception):
    """The server has answered the upgrade with an HTTP response."""

    def __init__(self, status: int, headers: dict[str, str], body: Any) -> None:
        super().__init__(f"{status} {body}")
        self.status = status
        self.headers = headers
        self.body = body


class RealtimeClient:
    """`async with RealtimeClient(app) as client:` connects; `state` or `app` may be given for more than
    one."""

    path = "/v1/realtime"

    def __init__(
        self,
        generator: FakeGenerator | None = None,
        *,
        app: Any = None,
        config: ApiConfig | None = None,
        query: str = "model=omni",
        subprotocols: tuple[str, ...] = (),
        state: ServerState | None = None,
    ) -> None:
        self.generator = generator if generator is not None else FakeGenerator()
        self.state = state if state is not None else ServerState(self.generator)
        self._app = app if app is not None else realtime_app(self.state, config)
        self._scope: dict[str, Any] = {
            "type": "websocket",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "scheme": "ws",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [],
            "subprotocols": list(subprotocols),
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "extensions": {"websocket.http.response": {}},
        }
        self._to_server: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self._from_server: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        self.reading = asyncio.Event()
        """Cleared: the connection takes nothing more from the server."""
        self.reading.set()
        self.events: list[Event] = []
        """All that have been read."""
        self.subprotocol: str | None = None
        self._ids: set[str] = set()

    async def __aenter__(self) -> "RealtimeClient":
        self._to_server.put_nowait({"type": "websocket.connect"})
        self.task = asyncio.ensure_future(self._app(self._scope, self._to_server.get, self._take))
        first = await self._message()
        if first["type"] == "websocket.http.response.start":
            body = await self._message()
            await self.task
            headers = {name.decode(): value.decode() for name, value in first["headers"]}
            raise Refused(first["status"], headers, json.loads(body["body"]))
        assert first["type"] == "websocket.accept"
        self.subprotocol = first["subprotocol"]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.leave()

    async def leave(self) -> None:
        """Drops the connection; returns when the server has let go of it."""
        self._to_server.put_nowait({"type": "websocket.disconnect", "code": 1006})
        await asyncio.wait_for(self.task, 10)

    async def send(self, type: str, **fields: Any) -> None:
        await self.send_raw(json.dumps({"type": type, **fields}))

    async def send_raw(self, frame: str | bytes) -> None:
        kind = "text" if isinstance(frame, str) else "bytes"
        self._to_server.put_nowait({"type": "websocket.receive", kind: frame})

    async def next(self) -> Event:
        """The next event. Raises `Closed`."""
        message = await self._message()
        if message["type"] == "websocket.close":
            raise Closed(message["code"], message["reason"])
        event: Event = json.loads(message["text"])
        check_event(event, self._ids)
        self.events.append(event)
        return event

    async def until(self, type: str) -> Event:
        """Reads up to the next event of that type."""
        while True:
            event = await self.next()
            if event["type"] == type:
                return event

    async def nothing_comes(self) -> None:
        """The server has nothing to say: an answer to something else comes first."""
        await self.send("input_audio_buffer.clear")
        event = await self.next()
        assert event["type"] == "input_audio_buffer.cleared"

    async def opened(self, **session: Any) -> "RealtimeClient":
        """Reads the first event, and changes the session where fields are given."""
        assert (await self.next())["type"] == "session.created"
        if session:
            await self.send("session.update", session={"type": "realtime", **session})
            assert (await self.next())["type"] == "session.updated", self.events[-1]
        return self

    async def say(self, text: str) -> str:
        """Adds a user's message; returns its id."""
        content = [{"type": "input_text", "text": text}]
        await self.send(
            "conversation.item.create", item={"type": "message", "role": "user", "content": content}
        )
        item_id: str = (await self.until("conversation.item.done"))["item"]["id"]
        return item_id

    async def answer(self, response: Event | None = None) -> Event:
        """Asks for a response; returns it at its end."""
        await self.send("response.create", **({} if response is None else {"response": response}))
        done: Event = (await self.until("response.done"))["response"]
        return done

    async def begin(self) -> None:
        """Asks for a response; returns when the first audio has come."""
        await self.send("response.create")
        await self.until("response.output_audio.delta")

    async def append(self, samples: npt.NDArray[np.float32], *, piece: int = 2_400) -> None:
        """Sound at 24 kHz, in pieces of 100 ms."""
        pcm = np.rint(samples * 32767).astype("<i2")
        for begin in range(0, len(pcm), piece):
            await self.send(
                "input_audio_buffer.append", audio=base64_of(pcm[begin : begin + piece].tobytes())
            )

    async def refused(self, type: str, **fields: Any) -> Event:
        """Sends what must be answered by an error, and returns that."""
        await self.send(type, event_id="mine", **fields)
        event = await self.next()
        assert event["type"] == "error"
        assert event["error"]["event_id"] == "mine"
        error: Event = event["error"]
        return error

    def types(self) -> list[str]:
        return [event["type"] for event in self.events]

    def of_type(self, type: str) -> list[Event]:
        return [event for event in self.events if event["type"] == type]

    async def _message(self) -> MutableMapping[str, Any]:
        getting = asyncio.ensure_future(self._from_server.get())
        await asyncio.wait({getting, self.task}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        if not getting.done() and self.task.done():
            self.task.result()
        return await asyncio.wait_for(getting, 1)

    async def _take(self, message: MutableMapping[str, Any]) -> None:
        await self.reading.wait()
        self._from_server.put_nowait(message)


def check_event(event: Event, ids: set[str]) -> None:
    """What must hold for every event; `ids` are those seen before."""
    assert event["type"] in ALLOWED
    assert event["event_id"] not in ids
    ids.add(event["event_id"])
    _SCHEMA.validate_python(event)


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def audio_of(events: list[Event]) -> bytes:
    """The audio of all deltas."""
    deltas = [
        base64.b64decode(e["delta"], validate=True)
        for e in events
        if e["type"] == "response.output_audio.delta"
    ]
    assert all(len(delta) % 2 == 0 for delta in deltas)
    return b"".join(deltas)


def silence(seconds: float) -> npt.NDArray[np.float32]:
    return np.zeros(int(seconds * 24_000), dtype=np.float32)


def voice(seconds: float) -> npt.NDArray[np.float32]:
    """What `ScriptedModel` takes for speech."""
    return (0.3 * np.sin(2 * np.pi * 220 * np.arange(int(seconds * 24_000)) / 24_000)).astype(np.float32)
