"""One streamed chat completion, as a client reads it: server-sent events, and the chunks that they hold."""

import base64
import binascii
import os
import time
from collections.abc import AsyncGenerator

import aiohttp
from pydantic import BaseModel, ValidationError

_DONE = b"[DONE]"


class StreamError(Exception):
    """There is no answer, or it is incomplete. The message is the reason, the same for equal failures."""


class ErrorObject(BaseModel):
    message: str


class ChunkAudio(BaseModel):
    """`delta.audio`."""

    transcript: str | None = None
    data: str | None = None
    """Base64."""

    def samples(self) -> bytes:
        """The decoded `data`. Raises `StreamError`."""
        return base64_decoded(self.data or "")


class MessageDelta(BaseModel):
    content: str | None = None
    audio: ChunkAudio | None = None


class Choice(BaseModel):
    delta: MessageDelta
    finish_reason: str | None = None


class CompletionTokensDetails(BaseModel):
    text_tokens: int | None = None
    audio_tokens: int | None = None


class PromptTokensDetails(BaseModel):
    cached_tokens: int | None = None


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class Chunk(BaseModel):
    """The fields that are read here, with their types; others are skipped."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: ErrorObject | str | None = None
    modality: str | None = None
    """vLLM-Omni's: "text" or "audio", of `delta.content`."""

    @property
    def content(self) -> str:
        return "".join(choice.delta.content or "" for choice in self.choices)

    @property
    def finish_reason(self) -> str | None:
        return next(
            (choice.finish_reason for choice in self.choices if choice.finish_reason is not None), None
        )

    @classmethod
    def parse(cls, data: bytes) -> "Chunk":
        """One event's data. Raises `StreamError` if it is not a chunk, or if it is an error that the server
        reports."""
        try:
            chunk = cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"]) or "event"
            raise StreamError(f"not a chunk of a chat completion: {field}: {first['type']}") from error
        if chunk.error is not None:
            message = chunk.error.message if isinstance(chunk.error, ErrorObject) else chunk.error
            raise StreamError(f"error in the stream: {message}")
        return chunk


class _ErrorBody(BaseModel):
    """Of a response whose status is not 200."""

    error: ErrorObject


class EventParser:
    """Collects the `data` of server-sent events from bytes that may be cut anywhere. Skips comments and other
    fields.

    Lines end in LF or CR LF. A lone CR, which the standard allows as well, does not end a line here: servers
    that send JSON do not use it.
    """

    def __init__(self) -> None:
        self._unfinished: list[bytes] = []
        """Parts of a line without its end; joined once, so that the cost of a long line grows with its length
        only."""
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> list[bytes]:
        """The data of every event that `part` completes, in order."""
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


async def stream_events(
    session: aiohttp.ClientSession, url: str, body: bytes, timeout: aiohttp.ClientTimeout
) -> AsyncGenerator[tuple[bytes, float], None]:
    """Posts `body` (JSON) to `url`. Yields the data of each event before `[DONE]`, and when it arrived, on
    the clock of `time.perf_counter`; ends with the last byte of the response.

    Raises `StreamError` if there is no answer or it ends early, and `TimeoutError` as `timeout` says.
    """
    parser = EventParser()
    is_done = False
    headers = {"Content-Type": "application/json"}
    try:
        async with session.post(url, data=body, headers=headers, timeout=timeout) as response:
            if response.status != 200:
                raise StreamError(f"HTTP {response.status}: {error_message(await response.read())}")
            async for part in response.content.iter_any():
                arrived_s = time.perf_counter()  # before any parsing, whose time is not the server's
                for data in parser.feed(part):
                    is_done = is_done or data == _DONE
                    if not is_done:
                        yield data, arrived_s
    except aiohttp.ClientPayloadError as error:
        raise StreamError("the connection broke in the middle of the answer") from error
    except TimeoutError:
        raise  # some of aiohttp's are client errors as well
    except aiohttp.ClientError as error:
        raise StreamError(f"the server cannot be reached: {why_unreachable(error)}") from error
    if not is_done:
        raise StreamError("the stream ended without [DONE]")


def base64_decoded(text: str) -> bytes:
    """Raises `StreamError`."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise StreamError("audio that is not base64") from error


def error_message(body: bytes) -> str:
    """Of a response whose status is not 200: its message, or its first 200 bytes if it has none."""
    try:
        return _ErrorBody.model_validate_json(body).error.message
    except ValidationError:
        return body[:200].decode(errors="replace")


def why_unreachable(error: aiohttp.ClientError | TimeoutError) -> str:
    """In words for the person who asked. aiohttp's own messages are for developers: `Cannot connect to host
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
