"""Streamed answers, as a client reads them: server-sent events, and the chunks of a chat completion."""

import base64
import io
import os
import time
import wave
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import cached_property
from typing import Annotated, ClassVar, Self

import aiohttp
from pydantic import AliasPath, BaseModel, Field, ValidationError

SAMPLE_RATE_HZ = 24_000
"""Rate of answer audio."""
_READ_BUFFER_BYTES = 2**20
_DONE = b"[DONE]"


class StreamError(Exception):
    """The answer is missing or incomplete. The message is the reason, identical for equal failures."""


class _ErrorObject(BaseModel):
    message: str


class _Delta(BaseModel):
    content: str | None = None
    transcript: Annotated[str | None, Field(validation_alias=AliasPath("audio", "transcript"))] = None
    audio: Annotated[str | None, Field(validation_alias=AliasPath("audio", "data"))] = None
    """Base64 of samples."""


class _Choice(BaseModel):
    delta: _Delta
    finish_reason: str | None = None


class Usage(BaseModel):
    """Token counts that the server reports; None if it reports none."""

    prompt_tokens: int
    cached_tokens: Annotated[
        int | None, Field(validation_alias=AliasPath("prompt_tokens_details", "cached_tokens"))
    ] = None
    completion_tokens: int = 0
    codec_tokens: Annotated[
        int | None, Field(validation_alias=AliasPath("completion_tokens_details", "audio_tokens"))
    ] = None
    counted_text_tokens: Annotated[
        int | None, Field(validation_alias=AliasPath("completion_tokens_details", "text_tokens"))
    ] = None

    @property
    def text_tokens(self) -> int:
        """Some servers count text and audio together."""
        if self.counted_text_tokens is not None:
            return self.counted_text_tokens
        return self.completion_tokens - (self.codec_tokens or 0)


class StreamedEvent(BaseModel):
    """The JSON of one event. The fields that are read are those of subclasses; others are ignored."""

    called: ClassVar[str]
    """Names the event in error messages."""
    error: _ErrorObject | str | None = None

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Parses one event's data. Raises `StreamError` if it is malformed, or if the server reports an
        error."""
        try:
            event = cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "event"
            raise StreamError(f"not {cls.called}: {field}: {first['type']}") from error
        if event.error is not None:
            message = event.error.message if isinstance(event.error, _ErrorObject) else event.error
            raise StreamError(f"error in the stream: {message}")
        return event


class Chunk(StreamedEvent):
    called = "a chunk of a chat completion"
    choices: list[_Choice] = []
    usage: Usage | None = None
    modality: str | None = None
    """Set by vLLM-Omni (0.30): `delta.content` is "text", or "audio", the base64 of a complete WAV file."""

    @cached_property
    def text(self) -> str:
        if self.modality == "audio":
            return ""
        # A server may send the text of a spoken answer both as content and as transcript.
        return "".join(choice.delta.transcript or choice.delta.content or "" for choice in self.choices)

    @cached_property
    def samples(self) -> bytes:
        """Little-endian int16 samples, mono, at `SAMPLE_RATE_HZ`. Raises `StreamError`."""
        if self.modality == "audio":
            return b"".join(_wav_samples(_decoded(choice.delta.content)) for choice in self.choices)
        return b"".join(_decoded(choice.delta.audio) for choice in self.choices)

    @property
    def finish_reason(self) -> str | None:
        return next(
            (choice.finish_reason for choice in self.choices if choice.finish_reason is not None), None
        )


class _ErrorBody(BaseModel):
    """Body of a response whose status is not 200."""

    error: _ErrorObject


class EventParser:
    """Collects the `data` of server-sent events from bytes that may be split anywhere. Skips comments and
    other fields.

    Lines end in LF or CR LF. A lone CR, which the standard also allows, does not end a line here: servers
    that send JSON do not use it.
    """

    def __init__(self) -> None:
        self._unfinished: list[bytes] = []
        """Parts of an incomplete line; joined once, so that the cost of a long line is linear in its
        length."""
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> list[bytes]:
        """Returns the data of every event that `part` completes, in order."""
        if b"\n" not in part:
            self._unfinished.append(part)
            return []
        lines = b"".join([*self._unfinished, part]).split(b"\n")
        self._unfinished = [lines.pop()]
        events = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        return events


def open_session(api_key: str | None, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    headers = {"Accept-Encoding": "identity"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(headers=headers, read_bufsize=_READ_BUFFER_BYTES, connector=connector)


async def stream_chunks(
    session: aiohttp.ClientSession, url: str, body: bytes, timeout: aiohttp.ClientTimeout
) -> AsyncGenerator[tuple[Chunk, float], None]:
    """Yields the chunks before `[DONE]`, in the manner of `stream_events`. Also raises `StreamError` if
    `[DONE]` is missing or a chunk is malformed."""
    is_done = False
    async with aclosing(stream_events(session, url, body, timeout)) as events:
        async for data, arrived_s in events:
            is_done = is_done or data == _DONE
            if not is_done:
                yield Chunk.parse(data), arrived_s
    if not is_done:
        raise StreamError("the stream ended without [DONE]")


async def stream_events(
    session: aiohttp.ClientSession, url: str, body: bytes, timeout: aiohttp.ClientTimeout
) -> AsyncGenerator[tuple[bytes, float], None]:
    """Posts `body` (JSON) to `url`. Yields the data of each server-sent event with its arrival time on the
    clock of `time.perf_counter`; ends with the last byte of the response.

    Raises `StreamError` if the answer is refused or breaks off, and `TimeoutError` according to `timeout`.
    """
    parser = EventParser()
    headers = {"Content-Type": "application/json"}
    try:
        async with session.post(url, data=body, headers=headers, timeout=timeout) as response:
            if response.status != 200:
                raise StreamError(f"HTTP {response.status}: {error_message(await response.read())}")
            async for part in response.content.iter_any():
                arrived_s = time.perf_counter()  # before parsing, whose time is not the server's
                for data in parser.feed(part):
                    yield data, arrived_s
    except aiohttp.ClientPayloadError as error:
        raise StreamError("the connection broke in the middle of the answer") from error
    except TimeoutError:
        raise  # some of aiohttp's timeouts are client errors too
    except aiohttp.ClientError as error:
        raise StreamError(f"the server cannot be reached: {why_unreachable(error)}") from error


def _decoded(audio: str | None) -> bytes:
    try:
        return base64.b64decode(audio or "", validate=True)
    except ValueError as error:
        raise StreamError("audio that is not base64") from error


def _wav_samples(file: bytes) -> bytes:
    """Returns the samples of a WAV file. Bytes without a RIFF header are samples already."""
    if not file.startswith(b"RIFF"):
        return file
    try:
        with wave.open(io.BytesIO(file)) as reader:
            layout = (reader.getframerate(), reader.getnchannels(), reader.getsampwidth())
            samples = reader.readframes(reader.getnframes())
    except (wave.Error, EOFError) as error:
        raise StreamError("audio that is not a PCM WAV file") from error
    if layout != (SAMPLE_RATE_HZ, 1, 2):
        raise StreamError(f"audio that is not {SAMPLE_RATE_HZ} Hz mono 16-bit: {layout}")
    return samples


def error_message(body: bytes) -> str:
    """Returns the message of an error response, or its first 200 bytes if it has none."""
    try:
        return _ErrorBody.model_validate_json(body).error.message
    except ValidationError:
        return body[:200].decode(errors="replace")


def why_unreachable(error: aiohttp.ClientError | TimeoutError) -> str:
    """Describes the error for users. aiohttp's own messages are for developers: `Cannot connect to host
    127.0.0.1:8091 ssl:default [...]`."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not accepted: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return f"TLS failed: {error.os_error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        if number is not None and number > 0:
            return os.strerror(number)
        return str(error.os_error.strerror or error.os_error)
    if isinstance(error, aiohttp.ClientResponseError):
        return "what answers does not speak HTTP"
    return str(error) or type(error).__name__
