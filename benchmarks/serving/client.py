"""What a server says, as a client reads it: its models, and the server-sent events of streamed answers."""

import base64
import io
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Self

import aiohttp
import soundfile
from pydantic import AliasPath, BaseModel, Field, ValidationError

from omni_server.errors import ConfigError

SAMPLE_RATE_HZ = 24_000
"""Rate of answer audio."""
_READ_BUFFER_BYTES = 2**20
_KEEP_ALIVE_S = 2.0
"""Shorter than the keep-alive of servers (uvicorn: 5 s), so that no request uses a connection being
closed."""
_DEFAULT_VOICE = "Chelsie"


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

    def counts(self) -> dict[str, int | None]:
        """Returns the counts by the names that they have in the results."""
        names = ("prompt_tokens", "cached_tokens", "text_tokens", "codec_tokens")
        return {name: getattr(self, name) for name in names}


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
        return next((choice.finish_reason for choice in self.choices if choice.finish_reason), None)


class ImageEvent(StreamedEvent):
    """One event of `/v1/images/generations`."""

    called = "an event of an image"
    type: str = ""
    b64_json: str = ""
    """Base64 of a PNG."""


class _ErrorBody(BaseModel):
    error: _ErrorObject


def open_session(api_key: str | None) -> aiohttp.ClientSession:
    headers = {"Accept-Encoding": "identity"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
    return aiohttp.ClientSession(headers=headers, read_bufsize=_READ_BUFFER_BYTES, connector=connector)


async def stream_events(
    session: aiohttp.ClientSession, url: str, body: bytes, timeout: aiohttp.ClientTimeout
) -> AsyncGenerator[tuple[bytes, float], None]:
    """Yields the data of each server-sent event with its arrival time; otherwise as `stream_bytes`.

    Lines end in LF, as those of the servers that are measured do."""
    incomplete = b""
    async with aclosing(stream_bytes(session, url, body, timeout)) as parts:
        async for part, arrived_s in parts:
            *events, incomplete = (incomplete + part).split(b"\n\n")
            for event in events:
                data = [line[5:].lstrip(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
                if data:
                    yield b"\n".join(data), arrived_s


async def stream_bytes(
    session: aiohttp.ClientSession, url: str, body: bytes, timeout: aiohttp.ClientTimeout
) -> AsyncGenerator[tuple[bytes, float], None]:
    """Posts `body` (JSON) to `url`. Yields what arrives with its time on the clock of `time.perf_counter`;
    ends with the last byte of the response.

    Raises `StreamError` if the answer is refused or breaks off, and `TimeoutError` according to `timeout`.
    """
    headers = {"Content-Type": "application/json"}
    try:
        async with session.post(url, data=body, headers=headers, timeout=timeout) as response:
            if response.status != 200:
                raise StreamError(f"HTTP {response.status}: {error_message(await response.read())}")
            async for part in response.content.iter_any():
                yield part, time.perf_counter()  # before parsing, whose time is not the server's
    except aiohttp.ClientPayloadError as error:
        raise StreamError("the connection broke in the middle of the answer") from error
    except TimeoutError:
        raise  # some of aiohttp's timeouts are client errors too
    except aiohttp.ClientError as error:
        raise StreamError(f"the server cannot be reached: {error}") from error


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
        samples, rate_hz = soundfile.read(io.BytesIO(file), dtype="int16")
    except soundfile.LibsndfileError as error:
        raise StreamError("audio that is not a WAV file") from error
    if rate_hz != SAMPLE_RATE_HZ or samples.ndim != 1:
        raise StreamError(f"audio that is not {SAMPLE_RATE_HZ} Hz mono")
    return bytes(samples.tobytes())


def error_message(body: bytes) -> str:
    """Returns the message of an error response, or its first 200 bytes if it has none."""
    try:
        return _ErrorBody.model_validate_json(body).error.message
    except ValidationError:
        return body[:200].decode(errors="replace")


class _Model(BaseModel):
    id: str
    voices: list[str] = []


class _ModelList(BaseModel):
    data: list[_Model]


class _Version(BaseModel):
    version: str | None = None


@dataclass(frozen=True)
class Served:
    model: str
    voice: str
    version: str | None


async def discover(session: aiohttp.ClientSession, base_url: str, model: str | None) -> Served:
    """Uses `model` as given; None selects the first that `/v1/models` lists. Raises `ConfigError` if no
    server answers, or if the answer is unexpected."""
    url = f"{base_url}/v1/models"
    try:
        async with session.get(url) as response:
            status, body = response.status, await response.read()
        async with session.get(f"{base_url}/version") as response:
            about = await response.read() if response.status == 200 else b"{}"
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(
            f"no server answers at {base_url} ({reason}); --url names another address"
        ) from error
    if status != 200:
        raise ConfigError(f"{url} answers {status}: {error_message(body)}")
    try:
        models = _ModelList.model_validate_json(body).data
        version = _Version.model_validate_json(about).version
    except ValidationError as error:
        raise ConfigError(f"{url} does not answer with a list of models, or /version with one") from error
    if not models:
        raise ConfigError(f"{url} lists no model")
    chosen = next((listed for listed in models if model in (None, listed.id)), None)
    if chosen is None:  # it may still be served: the requests will show it
        return Served(str(model), _DEFAULT_VOICE, version)
    return Served(chosen.id, next(iter(chosen.voices), _DEFAULT_VOICE), version)
