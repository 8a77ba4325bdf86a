"""One streamed answer as it arrives."""

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import aiohttp
from pydantic import JsonValue

from omni_server.client.stream import Chunk, StreamError, stream_events

SAMPLE_RATE_HZ = 24_000
"""Of `pcm16`, little-endian 16-bit mono."""


@dataclass(frozen=True)
class Piece:
    """What one event of the stream adds."""

    text: str = ""
    audio: bytes = b""


@dataclass
class Received:
    """What has arrived so far. Times in seconds since the question was sent, None until it happens."""

    text: str = ""
    audio: bytearray = field(default_factory=bytearray)
    finish_reason: str | None = None
    first_text_s: float | None = None
    first_audio_s: float | None = None
    last_s: float = 0.0

    @property
    def seconds_of_speech(self) -> float:
        return len(self.audio) / 2 / SAMPLE_RATE_HZ

    def add(self, chunk: Chunk, at_s: float) -> Piece:
        """Raises `StreamError` for audio that is not base64."""
        self.last_s = at_s
        text, audio = "", b""
        for choice in chunk.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            delta = choice.delta.audio
            # A server may send the text of a spoken answer as content, too, in addition to the transcript.
            text += (delta.transcript if delta is not None else None) or choice.delta.content or ""
            if delta is not None:
                audio += delta.samples()
        if text and self.first_text_s is None:
            self.first_text_s = at_s
        if audio and self.first_audio_s is None:
            self.first_audio_s = at_s
        self.text += text
        self.audio += audio
        return Piece(text, audio)


async def ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, JsonValue], received: Received
) -> AsyncGenerator[Piece, None]:
    """Posts `body` to `url` and yields text and audio as they arrive, each added to `received` first.

    Raises `StreamError` for a refusal, a break and an answer without an end.
    """
    began_s = time.perf_counter()
    # No limit in total: a long answer may take minutes, and a working server sends keep-alive comments.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=120)
    try:
        async with aclosing(stream_events(session, url, json.dumps(body).encode(), timeout)) as events:
            async for data, arrived_s in events:
                piece = received.add(Chunk.parse(data), arrived_s - began_s)
                if piece.text or piece.audio:
                    yield piece
    except TimeoutError as error:
        raise StreamError("the server has stopped answering") from error
