"""`/v1/audio/speech/stream`: a WebSocket that speaks texts while they are written, one after another.

Messages that vLLM-Omni has, too, have its names."""

import asyncio
import base64
import logging
import re
from collections.abc import AsyncIterator, Mapping
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
from omni_server.api.realtime.connection import release, serve_session
from omni_server.api.realtime.outbox import Outbox
from omni_server.api.realtime.server_events import new_id
from omni_server.api.speech import SpeechRequest, audio_pieces, end_of, parse_without_text, requested_clone
from omni_server.api.state import ServerState
from omni_server.api.validation import unsupported
from omni_server.audio.formats import AudioFormat
from omni_server.errors import InvalidRequestError, OmniError
from omni_server.types import (
    SAMPLE_RATE_HZ,
    Flush,
    ModelInfo,
    OmniRequest,
    SamplingConfig,
    SpeechOutput,
    TextAlignment,
)

logger = logging.getLogger(__name__)

MAX_CHARS = 256 * 1024
"""Of the texts of one session that have not been spoken to their end. Contexts hold less."""
UTTERANCE_CHARS = 1024
"""What an utterance counts as, besides its text."""

_WIDE = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"  # written without spaces
_WORD = re.compile(rf"[{_WIDE}][^\w\s]*|[^\s{_WIDE}]+")


class SessionConfig(SpeechRequest):
    """Settings of the utterances that begin after it."""

    model: str = ""
    input: str = ""
    """Not used: texts come with `input.text`."""
    alignment: bool = False
    """Report when the model was given each word."""
    audio: Literal["binary", "base64"] = "binary"


class InputText(ClientEvent):
    text: str


class InputMark(ClientEvent):
    type: Literal["input.flush", "input.done", "input.cancel"]


_EVENTS: Mapping[str, type[BaseModel]] = {
    "session.config": SessionConfig,
    "input.text": InputText,
    "input.flush": InputMark,
    "input.done": InputMark,
    "input.cancel": InputMark,
}


@dataclass(frozen=True)
class _Settings:
    given: SessionConfig
    speech: SpeechOutput
    """Without text."""
    sampling: Mapping[str, SamplingConfig]
    audio_format: AudioFormat


class SpeechSession:
    """Implements `omni_server.api.realtime.connection.Session`."""

    def __init__(
        self, model: ModelInfo, state: ServerState, config: ApiConfig, outbox: Outbox, media: MediaLoader
    ) -> None:
        self.id = new_id("sess")
        self.state = state
        self.outbox = outbox
        self.text_timeout_s = config.body_timeout_s
        self._model = model
        self._media = media
        self._settings: _Settings | None = None
        self._utterances: list[_Utterance] = []
        """Those that have not ended, in order."""
        self._num_begun = 0
        self._written: _Utterance | None = None
        """The one whose text comes. If it has ended early, the rest of its text is ignored."""
        self.send("session.created", session={"id": self.id, "model": model.name})

    @property
    def answers(self) -> list[asyncio.Task[None]]:
        return [utterance.task for utterance in self._utterances]

    async def close(self) -> None:
        await release(self.answers, self.id)

    async def handle(self, text: str | None) -> None:
        try:
            if text is None:
                raise InvalidRequestError("Binary frames are not supported; send text.", code="invalid_event")
            match parse_event(await read_frame(text), _EVENTS):
                case SessionConfig() as given:
                    self._settings = await self._parsed(given)
                case InputText(text=piece) if piece:
                    self._current(len(piece)).put(piece)
                case InputMark(type="input.flush") if self._written is not None:
                    self._current(1).put(Flush.FLUSH)
                case InputMark(type="input.done"):
                    self._current().put(None)
                    self._written = None
                case InputMark(type="input.cancel"):
                    self._written = None
                    self.outbox.drop_audio()
                    for utterance in self._utterances:
                        utterance.cancel()
        except OmniError as error:
            self.send_error(error)

    def send(self, kind: str, audio_of: str | None = None, /, **fields: JsonValue) -> None:
        self.outbox.put_frame(to_json({"type": kind, **fields}).decode(), audio_of)

    def send_error(self, error: OmniError, **fields: JsonValue) -> None:
        self.send("error", **fields, **envelope(error).model_dump())

    async def _parsed(self, given: SessionConfig) -> _Settings:
        generator = self.state.require_generator()
        if given.model:
            check_model(given.model, self._model)
        if given.alignment and given.non_streaming_mode:
            raise unsupported("With 'non_streaming_mode', the model is given all words at once.", "alignment")
        given.response_format = given.response_format or "pcm"
        speech, sampling, audio_format = parse_without_text(given, self._model)
        clone = await requested_clone(given, generator, self._media, self.state.voices)
        given.ref_audio = given.speaker_embedding = None  # large, and not needed any more
        speech = replace(speech, clone=clone, is_aligned=given.alignment)
        return _Settings(given, speech, sampling, audio_format)

    def _current(self, num_chars: int = 0) -> "_Utterance":
        """The utterance whose text comes; begins one. There is room for `num_chars` more."""
        num_chars += 0 if self._written is not None else UTTERANCE_CHARS
        if num_chars and num_chars + sum(utterance.num_chars for utterance in self._utterances) > MAX_CHARS:
            raise InvalidRequestError(
                f"More than {MAX_CHARS} characters of this session have not been spoken.",
                param="text",
                code="string_above_max_length",
            )
        if self._written is not None:
            return self._written
        if self._settings is None:
            raise InvalidRequestError("Send 'session.config' first.", code="invalid_event")
        self._written = utterance = _Utterance(self, self._settings, self._num_begun)
        self._num_begun += 1
        self._utterances.append(utterance)
        # A task cancelled before its first step never reaches a `finally` of its own.
        utterance.task.add_done_callback(lambda _: self._utterances.remove(utterance))
        return utterance


class _Utterance:
    def __init__(self, session: SpeechSession, settings: _Settings, index: int) -> None:
        """Speaks after the utterances that the session has now."""
        self.num_chars = UTTERANCE_CHARS
        self._session = session
        self._settings = settings
        self._index = index
        self._name = f"speech-{new_id('utterance')}"
        self._texts: asyncio.Queue[str | Flush | None] = asyncio.Queue()
        self._words = Words()
        self._is_over = False
        self.task = asyncio.create_task(self._run(session.answers), name=self._name)

    def put(self, piece: str | Flush | None) -> None:
        """None ends the text."""
        if not self._is_over:
            self.num_chars += len(piece) if isinstance(piece, str) else 1
            self._texts.put_nowait(piece)

    def cancel(self) -> None:
        """Sends the last message immediately, without waiting for the stages to release the request."""
        if not self._is_over:
            self._end("cancelled")
            self.task.cancel()

    def _abort(self) -> None:
        if not self._is_over:
            self._end("failed", self._session.state.abort_error)
            self.task.cancel()

    async def _run(self, earlier: list[asyncio.Task[None]]) -> None:
        state = self._session.state
        with state.request_in_flight():
            state.on_abort.add(self._abort)
            try:
                if earlier:
                    await asyncio.wait(earlier)
                await self._speak()
                self._end("completed")
            except OmniError as error:
                logger.info("%s failed: %s", self._name, logged(error))
                self._end("failed", error)
            except Exception:
                logger.exception("%s failed", self._name)
                self._end("failed", unexpected_error())
            finally:
                state.on_abort.discard(self._abort)

    async def _speak(self) -> None:
        settings, state, name = self._settings, self._session.state, self._name
        text = ""
        while not text.strip():
            if (piece := await self._piece()) is None:
                return  # nothing to say, as in a turn that only calls tools
            text += piece if isinstance(piece, str) else ""
        speech = replace(settings.speech, pieces=self._pieces(text))
        request = OmniRequest(f"{name}-0", (), speech, settings.sampling)
        stream = AnswerStream(
            state.require_generator(), state, name, one_by_one=[request], input_param="input"
        )
        format_name = settings.given.response_format
        self._send("audio.start", format=format_name, sample_rate=SAMPLE_RATE_HZ, channels=1)
        speed = settings.given.speed or 1.0
        pace = state.audio_pace(speed)
        file = audio_pieces(stream, name, settings.audio_format, speed, pace, on_alignment=self._align)
        async with aclosing(file):
            async for data in file:
                self._send_audio(data)
        self._send_words(self._words.finish())
        reason, usage = end_of(stream)
        self._send("audio.done", finish_reason=reason, usage=usage.model_dump())

    async def _pieces(self, text: str) -> AsyncIterator[str | Flush]:
        """`text`, and what comes after it."""
        yield text
        while (piece := await self._piece()) is not None:
            yield piece

    async def _piece(self) -> str | Flush | None:
        timeout_s = self._session.text_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._texts.get()
        except TimeoutError:
            text = f"For {timeout_s:g} seconds, neither more text came nor 'input.done'."
            raise InvalidRequestError(text, code="text_timeout") from None

    def _align(self, alignment: TextAlignment) -> None:
        end_s = alignment.end_sample / SAMPLE_RATE_HZ / (self._settings.given.speed or 1.0)
        self._send_words(self._words.push(alignment.text, round(1000 * end_s)))

    def _send_words(self, words: list[JsonValue]) -> None:
        if words:
            self._send("alignment", words=words)

    def _send_audio(self, data: bytes) -> None:
        if self._settings.given.audio == "base64":
            self._send("audio.chunk", self._name, audio_b64=base64.b64encode(data).decode())
        elif not self._is_over:
            self._session.outbox.put_frame(data, self._name)

    def _end(self, status: str, error: OmniError | None = None) -> None:
        if error is not None and not self._is_over:
            self._session.send_error(error, utterance_index=self._index)
        self._send("session.done", status=status)
        self._is_over = True

    def _send(self, kind: str, audio_of: str | None = None, /, **fields: JsonValue) -> None:
        if not self._is_over:
            self._session.send(kind, audio_of, utterance_index=self._index, **fields)


class Words:
    """Splits a text that comes in pieces into words. Each Chinese or Japanese character is one."""

    _rest = ""  # a word that may go on
    _end_ms = 0

    def push(self, text: str, end_ms: int) -> list[JsonValue]:
        """Returns the words that are complete, each with the `end_ms` of the piece that it ends in."""
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


def speech_socket_router(state: ServerState, config: ApiConfig, media: MediaLoader) -> APIRouter:
    router = APIRouter()

    def open_session(model: ModelInfo, outbox: Outbox) -> SpeechSession:
        if not model.reads_text:
            raise unsupported(
                f"The model '{model.name}' does not speak a text while it is written; send whole texts to "
                "/v1/audio/speech.",
                "model",
            )
        return SpeechSession(model, state, config, outbox, media)

    @router.websocket("/v1/audio/speech/stream", name="speech stream")
    async def serve(websocket: WebSocket) -> None:
        await serve_session(websocket, state, config, open_session)

    return router
