"""One streamed answer as it arrives."""

import base64
import binascii
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import aiohttp
from pydantic import JsonValue, ValidationError

from omni_server.client.chunks import Chunk, ErrorObject, error_message
from omni_server.client.reach import why_unreachable
from omni_server.client.sse import EventParser

SAMPLE_RATE_HZ = 24_000
"""Of `pcm16`, little-endian 16-bit mono."""


class AnswerFailedError(Exception):
    """The question was not answered; the message is for the person who asked."""


@dataclass(frozen=True)
class Piece:
    """What one event of the stream adds."""

    text: str = ""
    audio: bytes = b""


@dataclass
class Received:
    """What has come so far. Times in seconds since the question was sent, None while there is none."""

    text: str = ""
    audio: bytearray = field(default_factory=bytearray)
    audio_id: str | None = None
    expires_at: int = 0
    finish_reason: str | None = None
    first_text_s: float | None = None
    first_audio_s: float | None = None
    last_s: float = 0.0

    @property
    def seconds_of_speech(self) -> float:
        return len(self.audio) / 2 / SAMPLE_RATE_HZ


async def ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, JsonValue], received: Received
) -> AsyncGenerator[Piece, None]:
    """Posts `body` to `url` and yields text and sound as they come, each added to `received` first.

    Raises `AnswerFailedError` for a refusal, a break and an answer without an end.
    """
    began = time.perf_counter()
    try:
        # No limit in all: a long answer may take minutes. A server that hangs sends not even keep-alive comments.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=120)
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        async with session.post(url, data=data, headers=headers, timeout=timeout) as response:
            if response.status != 200:
                raise AnswerFailedError(f"the server answers {response.status}: {error_message(await response.read())}")
            parser = EventParser()
            async for part in response.content.iter_any():
                for event in parser.feed(part):
                    if event == b"[DONE]":
                        return
                    received.last_s = time.perf_counter() - began
                    piece = _add(_parsed(event), received)
                    if piece.text or piece.audio:
                        yield piece
    except TimeoutError as error:
        raise AnswerFailedError("the server does not answer any more") from error
    except aiohttp.ClientPayloadError as error:
        raise AnswerFailedError("the connection broke in the middle of the answer") from error
    except aiohttp.ClientError as error:
        raise AnswerFailedError(f"the server cannot be reached: {why_unreachable(error)}") from error
    raise AnswerFailedError("the answer broke off")


def _parsed(event: bytes) -> Chunk:
    try:
        chunk = Chunk.model_validate_json(event)
    except ValidationError as error:
        raise AnswerFailedError("the server sends what is no chunk of a chat completion") from error
    if chunk.error is not None:
        message = chunk.error.message if isinstance(chunk.error, ErrorObject) else chunk.error
        raise AnswerFailedError(f"the answer failed: {message}")
    return chunk


def _add(chunk: Chunk, received: Received) -> Piece:
    text, audio = "", b""
    for choice in chunk.choices:
        received.finish_reason = choice.finish_reason or received.finish_reason
        delta = choice.delta.audio
        # A server may send what is spoken as content too, beside the transcript.
        text += (delta.transcript if delta is not None else None) or choice.delta.content or ""
        if delta is not None:
            audio += _decoded(delta.data) if delta.data else b""
            received.audio_id = delta.id or received.audio_id
            received.expires_at = delta.expires_at or received.expires_at
    if text and received.first_text_s is None:
        received.first_text_s = received.last_s
    if audio and received.first_audio_s is None:
        received.first_audio_s = received.last_s
    received.text += text
    received.audio += audio
    return Piece(text, audio)


def _decoded(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise AnswerFailedError("the server sends sound that is not base64") from error
