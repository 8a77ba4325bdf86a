"""A bounded, ordered queue of events for the client; writers never wait."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NoReturn, get_args

from openai.types.realtime import ResponseAudioDeltaEvent
from pydantic import BaseModel

from omni_server.api.realtime.server_events import new_id

_MAX_CHARS = 16 * 1024 * 1024
"""Unsent events: four minutes of audio. Answers are generated faster than played; clients buffer them."""


class SlowClientError(Exception):
    """The client does not read what it is sent."""


class Outbox:
    def __init__(self, send: Callable[[str | bytes], Awaitable[None]], send_timeout_s: float) -> None:
        """`send` passes one frame to the connection and returns when there is room for the next."""
        self._send = send
        self._send_timeout_s = send_timeout_s
        self._frames: deque[tuple[str | bytes, str | None]] = deque()
        """Each with the response whose audio it is; None for other events."""
        self._num_chars = 0
        self._is_overflowing = False
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def put(self, kind: type[BaseModel], **fields: object) -> None:
        """`kind` is an event of `openai.types.realtime`; its `type` and an `event_id` join `fields`."""
        [name] = get_args(kind.model_fields["type"].annotation)
        event = kind(type=name, event_id=new_id("event"), **fields)
        owner = event.response_id if isinstance(event, ResponseAudioDeltaEvent) else None
        self.put_frame(event.model_dump_json(exclude_unset=True), owner)

    def put_frame(self, frame: str | bytes, audio_of: str | None = None) -> None:
        """`audio_of` names the response whose audio is in the frame."""
        if self._is_overflowing:
            return
        self._frames.append((frame, audio_of))
        self._num_chars += len(frame)
        self._is_overflowing = self._num_chars > _MAX_CHARS
        self._filled.set()
        self._empty.clear()

    def drop_audio(self, response_id: str | None = None) -> None:
        """Discards the unsent audio of a cancelled response; None: of all."""
        dropped = {owner for _, owner in self._frames if owner} if response_id is None else {response_id}
        self._frames = deque((frame, owner) for frame, owner in self._frames if owner not in dropped)
        self._num_chars = sum(len(frame) for frame, _ in self._frames)

    def forget_all(self) -> None:
        self._frames.clear()
        self._num_chars = 0
        self._is_overflowing = False

    async def run(self) -> NoReturn:
        """Sends until cancelled. Raises `SlowClientError` and whatever `send` raises."""
        while True:
            while self._frames:
                if self._is_overflowing:
                    raise SlowClientError
                frame, _ = self._frames.popleft()
                self._num_chars -= len(frame)
                try:
                    async with asyncio.timeout(self._send_timeout_s):
                        await self._send(frame)
                except TimeoutError:
                    raise SlowClientError from None
            self._empty.set()
            self._filled.clear()
            await self._filled.wait()

    async def wait_sent(self) -> None:
        """Returns when `run` has sent all events."""
        await self._empty.wait()
