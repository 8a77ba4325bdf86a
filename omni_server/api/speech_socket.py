"""`/v1/audio/speech/stream`: a WebSocket that speaks texts while they are written.

The messages have the names that vLLM-Omni gives them, and this server's errors. An utterance begins with its
first text and ends with `session.done`. Utterances are spoken one after another.
"""

import asyncio
import base64
import logging
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal

from fastapi import APIRouter, WebSocket
from pydantic import BaseModel, JsonValue
from pydantic_core import to_json

from omni_server.api.answer_stream import AnswerStream
from omni_server.api.config import ApiConfig
from omni_server.api.errors import envelope, logged, unexpected_error
from omni_server.api.media_loader import MediaLoader
from omni_server.api.parse import check_model
from omni_server.api.realtime.client_events import ClientEvent, parse_event, read_frame
from omni_server.api.realtime.connection import RELEASE_TIMEOUT_S, serve_session
from omni_server.api.realtime.outbox import Outbox
from omni_server.api.realtime.server_events import new_id
from omni_server.api.speech import (
    SpeechEnd,
    SpeechRequest,
    audio_pieces,
    parse_without_text,
    requested_clone,
)
from omni_server.api.state import ServerState
from omni_server.api.validation import unsupported
from omni_server.api.voice_store import VoiceStore
from omni_server.audio.formats import AudioFormat
from omni_server.errors import InvalidRequestError, OmniError
from omni_server.types import SAMPLE_RATE_HZ, Flush, ModelInfo, OmniRequest, SpeechOutput, TextAlignment

logger = logging.getLogger(__name__)

MAX_CHARS = 256 * 1024
"""Of the texts in one session that have not been spoken to their end. Contexts hold less."""
MAX_UTTERANCES = 16
"""In one session: the one that is spoken, and those that wait for it."""

_WIDE = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"  # written without spaces
_WORD = re.compile(rf"[{_WIDE}][^\w\s]*|[^\s{_WIDE}]+")


class SessionConfig(SpeechRequest):
    """Settings of the utterances that begin after it."""

    model: str = ""
    """Empty for the only one."""
    input: str = ""
    """Not used: texts come with `input.text`."""
    alignment: bool | None = None
    """Report which words the model has been given."""
    audio: Literal["binary", "base64"] | None = None
    """How audio is sent; `binary` is the default."""


class InputText(ClientEvent):
    text: str


class InputFlush(ClientEvent):
    pass


class InputDone(ClientEvent):
    pass


class InputCancel(ClientEvent):
    pass


_EVENTS: Mapping[str, type[BaseModel]] = {
    "session.config": SessionConfig,
    "input.text": InputText,
    "input.flush": InputFlush,
    "input.done": InputDone,
    "input.cancel": InputCancel,
}


@dataclass(frozen=True)
class _Settings:
    request: OmniRequest
    """Without text."""
    speech: SpeechOutput
    audio_format: AudioFormat
    speed: float
    is_base64: bool


class SpeechSession:
    """Implements `omni_server.api.realtime.connection.Session`."""

    def __init__(
        self,
        model: ModelInfo,
        state: ServerState,
        config: ApiConfig,
        outbox: Outbox,
        media: MediaLoader,
        voices: VoiceStore,
    ) -> None:
        self.id = new_id("sess")
        self._model = model
        self._state = state
        self._config = config
        self._outbox = outbox
        self._media = media
        self._voices = voices
        self._settings: _Settings | None = None
        self._utterances: list[_Utterance] = []
        """Those that have not ended, in order."""
        self._num_begun = 0
        self._written: _Utterance | None = None
        """The one whose text comes. It may have ended early: then the rest of its text is ignored."""
        session = {"id": self.id, "model": model.name}
        self._outbox.put_frame(_message("session.created", session=session))

    @property
    def is_busy(self) -> bool:
        return bool(self._utterances)

    async def wait_answered(self) -> None:
        while self._utterances:
            await asyncio.wait([utterance.task for utterance in self._utterances])

    async def close(self) -> None:
        tasks = [utterance.task for utterance in self._utterances]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=RELEASE_TIMEOUT_S)

    async def handle(self, text: str | None) -> None:
        try:
            if text is None:
                raise InvalidRequestError("Binary frames are not supported; send text.", code="invalid_event")
            match parse_event(await read_frame(text), _EVENTS):
                case SessionConfig() as given:
                    self._settings = await self._parsed(given)
                case InputText(text=piece) if piece:
                    self._check_room(len(piece))
                    self._current().put(piece)
                case InputFlush() if self._written is not None:
                    self._written.put(Flush.FLUSH)
                case InputDone():
                    self._current().put(None)
                    self._written = None
                case InputCancel():
                    self._written = None
                    for utterance in tuple(self._utterances):
                        utterance.cancel()
        except OmniError as error:
            self.send_error(error)

    def send_error(self, error: OmniError) -> None:
        self._outbox.put_frame(_error_message(error))

    async def _parsed(self, given: SessionConfig) -> _Settings:
        generator = self._state.require_generator()
        if given.model:
            check_model(given.model, self._model)
        if given.alignment and given.non_streaming_mode:
            raise unsupported("With 'non_streaming_mode', the model is given all words at once.", "alignment")
        if given.response_format is None:
            given.response_format = "pcm"
        request, speech, audio_format = parse_without_text(given, self._model)
        clone = await requested_clone(given, generator, self._media, self._voices)
        speech = replace(speech, clone=clone, is_aligned=bool(given.alignment))
        speed = 1.0 if given.speed is None else given.speed
        return _Settings(request, speech, audio_format, speed, given.audio == "base64")

    def _check_room(self, num_chars: int) -> None:
        if num_chars + sum(utterance.num_chars for utterance in self._utterances) > MAX_CHARS:
            raise InvalidRequestError(
                f"Invalid 'text': more than {MAX_CHARS} characters of this session have not been spoken.",
                param="text",
                code="string_above_max_length",
            )

    def _current(self) -> "_Utterance":
        """The utterance whose text comes; begins one."""
        if self._written is not None:
            return self._written
        if self._settings is None:
            raise InvalidRequestError("Send 'session.config' first.", code="invalid_event")
        if len(self._utterances) >= MAX_UTTERANCES:
            raise InvalidRequestError("Too many utterances wait to be spoken.", code="too_many_utterances")
        self._written = utterance = _Utterance(
            self._num_begun,
            self._settings,
            self._outbox,
            self._state,
            text_timeout_s=self._config.body_timeout_s,
            after=self._utterances[-1].task if self._utterances else None,
            on_end=self._utterances.remove,
        )
        self._num_begun += 1
        self._utterances.append(utterance)
        return utterance


class _Utterance:
    def __init__(
        self,
        index: int,
        settings: _Settings,
        outbox: Outbox,
        state: ServerState,
        *,
        text_timeout_s: float,
        after: "asyncio.Task[None] | None",
        on_end: Callable[["_Utterance"], object],
    ) -> None:
        """Speaks `after` another has ended. Calls `on_end` once everything is released."""
        self.num_chars = 0
        self._index = index
        self._name = f"speech-{new_id('utterance')}"
        self._settings = settings
        self._outbox = outbox
        self._state = state
        self._text_timeout_s = text_timeout_s
        self._texts: asyncio.Queue[str | Flush | None] = asyncio.Queue()
        self._words = Words()
        self._has_audio = False
        self._is_over = False
        self.task = asyncio.create_task(self._run(after), name=self._name)
        # A task cancelled before its first step never reaches a `finally` of its own.
        self.task.add_done_callback(lambda _: on_end(self))

    def put(self, piece: str | Flush | None) -> None:
        """None ends the text."""
        if not self._is_over:
            self.num_chars += len(piece) if isinstance(piece, str) else 0
            self._texts.put_nowait(piece)

    def cancel(self) -> None:
        """Writes the last message immediately, without waiting for the stages to release the request."""
        self._outbox.drop_audio(self._name)
        self._end("cancelled")
        self.task.cancel()

    async def _run(self, after: "asyncio.Task[None] | None") -> None:
        with self._state.request_in_flight():
            try:
                if after is not None:
                    await asyncio.wait([after])
                await self._speak()
                self._end("completed")
            except OmniError as error:
                logger.info("%s failed: %s", self._name, logged(error))
                self._end("failed", error)
            except Exception:
                logger.exception("%s failed", self._name)
                self._end("failed", unexpected_error())

    async def _speak(self) -> None:
        settings, state = self._settings, self._state
        speech = replace(settings.speech, pieces=self._pieces())
        request = replace(settings.request, request_id=f"{self._name}-0", speech=speech)
        generator = state.require_generator()
        stream = AnswerStream(generator, state, self._name, one_by_one=[request], input_param="input")
        pace = state.audio_pace(settings.speed)
        file = audio_pieces(
            stream, self._name, settings.audio_format, settings.speed, pace, on_alignment=self._align
        )
        async with aclosing(file):
            async for data in file:
                self._send_audio(data)
        self._send_words(self._words.finish())
        self._begin_audio()
        self._send("audio.done", **SpeechEnd.of(stream).model_dump())

    async def _pieces(self) -> AsyncGenerator[str | Flush, None]:
        while True:
            try:
                async with asyncio.timeout(self._text_timeout_s):
                    piece = await self._texts.get()
            except TimeoutError:
                text = f"For {self._text_timeout_s:g} seconds, neither more text came nor 'input.done'."
                raise InvalidRequestError(text, code="text_timeout") from None
            if piece is None:
                return
            yield piece

    def _align(self, alignment: TextAlignment) -> None:
        end_ms = round(1000 * alignment.end_sample / SAMPLE_RATE_HZ / self._settings.speed)
        self._send_words(self._words.push(alignment.text, end_ms))

    def _send_words(self, words: list[JsonValue]) -> None:
        if words:
            self._begin_audio()
            self._send("alignment", words=words)

    def _send_audio(self, data: bytes) -> None:
        self._begin_audio()
        if self._is_over:
            return
        if self._settings.is_base64:
            text = base64.b64encode(data).decode("ascii")
            message = _message("audio.chunk", utterance_index=self._index, audio_b64=text)
            self._outbox.put_frame(message, self._name)
        else:
            self._outbox.put_frame(data, self._name)

    def _begin_audio(self) -> None:
        if not self._has_audio:
            self._has_audio = True
            format_name = self._settings.audio_format
            self._send("audio.start", format=format_name, sample_rate=SAMPLE_RATE_HZ, channels=1)

    def _end(
        self, status: Literal["completed", "cancelled", "failed"], error: OmniError | None = None
    ) -> None:
        if error is not None and not self._is_over:
            self._outbox.put_frame(_error_message(error, utterance_index=self._index))
        self._send("session.done", status=status)
        self._is_over = True

    def _send(self, kind: str, **fields: JsonValue) -> None:
        if not self._is_over:
            self._outbox.put_frame(_message(kind, utterance_index=self._index, **fields))


class Words:
    """Splits a text that comes in pieces into words; Chinese and Japanese characters count as words."""

    def __init__(self) -> None:
        self._rest = ""  # a word that may go on
        self._end_ms = 0

    def push(self, text: str, end_ms: int) -> list[JsonValue]:
        """Returns the words that are complete, with the time at which the piece ends that completed each."""
        num_before = len(self._rest)
        text = self._rest + text
        found = list(_WORD.finditer(text))
        self._rest = found.pop()[0] if found and found[-1].end() == len(text) else ""
        before_ms, self._end_ms = self._end_ms, end_ms
        return [
            {"word": word[0], "end_ms": end_ms if word.end() > num_before else before_ms} for word in found
        ]

    def finish(self) -> list[JsonValue]:
        return [{"word": self._rest, "end_ms": self._end_ms}] if self._rest else []


def _message(kind: str, **fields: JsonValue) -> str:
    return to_json({"type": kind, **fields}).decode()


def _error_message(error: OmniError, **fields: JsonValue) -> str:
    return _message("error", **fields, **envelope(error).model_dump())


def speech_socket_router(
    state: ServerState, config: ApiConfig, media: MediaLoader, voices: VoiceStore
) -> APIRouter:
    router = APIRouter()

    def open_session(model: ModelInfo, outbox: Outbox) -> SpeechSession:
        if not model.reads_text:
            raise unsupported(
                f"The model '{model.name}' does not speak a text while it is written; send whole texts to "
                "/v1/audio/speech.",
                "model",
            )
        return SpeechSession(model, state, config, outbox, media, voices)

    @router.websocket("/v1/audio/speech/stream", name="speech stream")
    async def serve(websocket: WebSocket) -> None:
        await serve_session(websocket, state, config, open_session)

    return router
