"""One streamed answer as it arrives."""

import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import aiohttp
from pydantic import JsonValue

from omni_server.client.stream import SAMPLE_RATE_HZ, Chunk, StreamError, stream_chunks


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

    def add(self, chunk: Chunk, at_s: float) -> tuple[str, bytes]:
        """Text and samples of `chunk`. Raises `StreamError` for audio that is not base64."""
        self.last_s = at_s
        self.finish_reason = chunk.finish_reason or self.finish_reason
        text, samples = chunk.text, chunk.samples
        if text and self.first_text_s is None:
            self.first_text_s = at_s
        if samples and self.first_audio_s is None:
            self.first_audio_s = at_s
        self.text += text
        self.audio += samples
        return text, samples


async def ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, JsonValue], received: Received
) -> AsyncGenerator[tuple[str, bytes], None]:
    """Posts `body` to `url` and yields text and samples as they arrive, each added to `received` first.

    Raises `StreamError` for a refusal, a break and an answer without an end.
    """
    began_s = time.perf_counter()
    # No limit in total: a long answer may take minutes, and a working server sends keep-alive comments.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=120)
    try:
        async with aclosing(stream_chunks(session, url, json.dumps(body).encode(), timeout)) as chunks:
            async for chunk, arrived_s in chunks:
                yield received.add(chunk, arrived_s - began_s)
    except TimeoutError as error:
        raise StreamError("the server has stopped answering") from error
