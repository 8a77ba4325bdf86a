"""A client of `/v1/audio/speech/stream` without a socket, and a generator that speaks what it is given."""

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI

from omni_server.api.app import create_app
from omni_server.api.config import ApiConfig
from omni_server.api.state import ServerState
from omni_server.errors import InvalidRequestError, OmniError
from omni_server.generation import Deliver
from omni_server.types import (
    AudioDelta,
    CodecDelta,
    Flush,
    ModelInfo,
    OmniRequest,
    TextAlignment,
)
from tests.unit.api.fake_generator import READING_MODEL, FakeGeneration, FakeGenerator, finished
from tests.unit.api.realtime.realtime_client import Closed, Event, RealtimeClient

SAMPLES_PER_CHAR = 2400  # 0.1 s


def sound_of(text: str) -> npt.NDArray[np.float32]:
    """Each character sounds for a tenth of a second, as loud as it is high."""
    return np.repeat(np.array([ord(char) / 65536 for char in text], np.float32), SAMPLES_PER_CHAR)


class _Reading(FakeGeneration):
    def __init__(
        self,
        request_id: str,
        deliver: Deliver,
        first: str,
        rest: AsyncIterator[str | Flush],
        *,
        is_aligned: bool,
    ) -> None:
        self._first, self._rest, self._is_aligned = first, rest, is_aligned
        super().__init__(request_id, [], deliver)

    async def _run(self, script: Any, deliver: Deliver) -> None:
        num_samples = self._speak(self._first, 0, deliver)
        try:
            async for piece in self._rest:
                if isinstance(piece, str):
                    num_samples = self._speak(piece, num_samples, deliver)
        except OmniError as error:
            deliver(error)
        else:
            deliver(finished(codec_tokens=num_samples // SAMPLES_PER_CHAR))

    def _speak(self, text: str, first_sample: int, deliver: Deliver) -> int:
        for number, char in enumerate(text, 1):
            deliver(CodecDelta((ord(char),)))
            if self._is_aligned:
                deliver(TextAlignment(char, first_sample + number * SAMPLES_PER_CHAR))
        deliver(AudioDelta(first_sample, sound_of(text)))
        return first_sample + len(text) * SAMPLES_PER_CHAR


class ReadingGenerator(FakeGenerator):
    """Speaks each piece of a text as it comes; submits with the first one."""

    def __init__(self, model_info: ModelInfo = READING_MODEL) -> None:
        super().__init__(model_info)
        self.pieces: list[str | Flush] = []

    async def submit(self, request: OmniRequest, deliver: Deliver) -> FakeGeneration:
        if self.submit_error is not None or self.script is not None:
            return await super().submit(request, deliver)
        self.requests.append(request)
        assert request.speech is not None
        assert request.speech.pieces is not None
        pieces = self._noted(request.speech.pieces)
        first = await anext(pieces, None)
        if not isinstance(first, str):
            raise InvalidRequestError("there is no text to read", param="messages")
        is_aligned = request.speech.is_aligned
        generation = _Reading(request.request_id, deliver, first, pieces, is_aligned=is_aligned)
        self.generations.append(generation)
        return generation

    async def _noted(self, pieces: AsyncIterator[str | Flush]) -> AsyncIterator[str | Flush]:
        async for piece in pieces:
            self.pieces.append(piece)
            yield piece


class SpeechClient(RealtimeClient):
    """Binary frames are events of type `binary`."""

    path = "/v1/audio/speech/stream"

    def __init__(
        self,
        generator: FakeGenerator | None = None,
        config: ApiConfig | None = None,
        *,
        app: FastAPI | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        generator = ReadingGenerator() if generator is None else generator
        state = ServerState(generator)
        app = create_app(state, ApiConfig() if config is None else config) if app is None else app
        super().__init__(generator, app=app, state=state, query="")
        self._scope["headers"] = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]

    async def next(self) -> Event:
        message = await self._message()
        if message["type"] == "websocket.close":
            raise Closed(message["code"], message["reason"])
        is_binary = message.get("bytes") is not None
        event = {"type": "binary", "data": message["bytes"]} if is_binary else json.loads(message["text"])
        self.events.append(event)
        return event

    async def configured(self, **settings: Any) -> "SpeechClient":
        assert (await self.next())["type"] == "session.created"
        await self.send("session.config", **settings)
        return self

    async def speak(self, *pieces: str) -> list[Event]:
        """Sends a text in pieces; returns the events of its utterance."""
        for piece in pieces:
            await self.send("input.text", text=piece)
        await self.send("input.done")
        num_before = len(self.events)
        await self.until("session.done")
        return self.events[num_before:]


def pcm_of(events: Iterable[Event]) -> bytes:
    return b"".join(event["data"] for event in events if event["type"] == "binary")
