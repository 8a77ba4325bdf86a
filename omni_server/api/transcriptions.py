"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`: the model transcribes audio."""

import logging
import re
import unicodedata
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from openai.types.audio.transcription import UsageDuration, UsageTokens, UsageTokensInputTokenDetails
from pydantic import BaseModel, ConfigDict, Field

from omni_server.api.answer_stream import AnswerStream
from omni_server.api.config import ApiConfig
from omni_server.api.forms import Form, FormLimits, form_body, parse_form, read_form
from omni_server.api.media_loader import MediaLoader
from omni_server.api.openapi import GENERATION_ERRORS, OpenApi, any_of, event_stream
from omni_server.api.parse import check_model, check_transcribes
from omni_server.api.sampling import text_sampling
from omni_server.api.schemas import NonEmpty
from omni_server.api.state import ServerState
from omni_server.api.streaming import KEEP_ALIVE, EventStreamResponse, FrameTemplate, frame, until_disconnect
from omni_server.api.validation import unsupported, unsupported_choice
from omni_server.audio.cut import cut_at_pauses
from omni_server.errors import InvalidRequestError
from omni_server.types import (
    AudioPart,
    Finished,
    ModelInfo,
    OmniRequest,
    SamplingConfig,
    TextDelta,
    Transcribe,
    Usage,
)

logger = logging.getLogger(__name__)

_PIECE_SECONDS = 30.0
"""Longer recordings are split: speech recognition is trained on audio of at most this length."""
_TEXT_FORMATS = ("json", "text", "verbose_json")
_LANGUAGE_PATTERN = "^[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})*$"
_LISTS = ("timestamp_granularities", "include")
_WHY_NOT = {
    "srt": "the model gives no timestamps",
    "vtt": "the model gives no timestamps",
    "diarized_json": "the model does not tell speakers apart",
}
_LANGUAGE = re.compile(_LANGUAGE_PATTERN)


class TranscriptionForm(BaseModel):
    """The fields of the form except `file`. They come as strings, so that "true" is a boolean and "0.2" a
    number; those that are not listed are ignored, as clients send many."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)

    model: NonEmpty
    language: Annotated[str, Field(json_schema_extra={"pattern": _LANGUAGE_PATTERN})] | None = None
    """ISO 639-1 code of the language that is spoken, if it is known. Transcriptions only."""
    prompt: Annotated[str, Field(max_length=4096)] | None = None
    """Words that may occur, or the text before."""
    response_format: Annotated[str, Field(json_schema_extra={"enum": [*_TEXT_FORMATS]})] | None = None
    """`json` is the default."""
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    """0 (default) takes the likeliest words."""
    stream: bool | None = None
    """Transcriptions only; translations refuse `true`."""
    timestamp_granularities: Annotated[list[str], Field(json_schema_extra={"maxItems": 0})] | None = None
    """Not served: the model gives no timestamps."""
    include: Annotated[list[str], Field(json_schema_extra={"maxItems": 0})] | None = None
    """Not served."""


class Transcription(BaseModel):
    text: str
    usage: UsageTokens


class VerboseTranscription(BaseModel):
    """Has no `segments` and `words`: the model gives no timestamps, and the server does not invent any."""

    task: Literal["transcribe", "translate"]
    language: str
    """Of `text`. "und" (undetermined) unless the request has it: the model does not report it."""
    duration: float
    """Seconds."""
    text: str
    usage: UsageDuration


class TranscriptDelta(BaseModel):
    type: Literal["transcript.text.delta"]
    delta: str


class TranscriptDone(BaseModel):
    type: Literal["transcript.text.done"]
    text: str
    usage: UsageTokens


_DELTAS = FrameTemplate(lambda text: TranscriptDelta(type="transcript.text.delta", delta=text))


class TranscriptionService:
    def __init__(self, state: ServerState, config: ApiConfig, media: MediaLoader) -> None:
        self._state = state
        self._form_limits = FormLimits(config.max_upload_bytes)
        self._keep_alive_s = config.sse_keep_alive_s
        self._media = media

    async def create(self, request: Request, *, to_english: bool) -> Response:
        """Sends no status before the first words are ready. Raises `OmniError`."""
        self._state.require_generator()  # before reading megabytes of body
        form = await read_form(request, self._form_limits)
        return await until_disconnect(self._answer(form, to_english=to_english), request.receive)

    async def _answer(self, form: Form, *, to_english: bool) -> Response:
        generator = self._state.require_generator()
        fields, file = _parse_form(form, generator.model_info, to_english=to_english)
        sampling = text_sampling(SamplingConfig(temperature=fields.temperature or 0.0), generator.model_info)
        async with AsyncExitStack() as held:
            audio = await self._load(file, held)
            name = f"transcription-{uuid.uuid4().hex}"
            pieces = cut_at_pauses(audio.samples, audio.sample_rate_hz, _PIECE_SECONDS)
            tasks = [
                Transcribe(AudioPart(piece, audio.sample_rate_hz), to_english, fields.language, fields.prompt)
                for piece in pieces
            ]
            requests = [
                OmniRequest(f"{name}-{index}", generator.task_messages(task), sampling=sampling)
                for index, task in enumerate(tasks)
            ]
            stream = AnswerStream(generator, self._state, name, one_by_one=requests, input_param="file")
            if fields.stream:
                events = _events(stream, name, self._keep_alive_s)
                first = await anext(events)
                return EventStreamResponse(name, events, first=first, held=held.pop_all())
            text = "".join([delta async for delta in _deltas(stream, name)])
            usage = _usage(stream.usages)
        if fields.response_format == "text":
            return Response(text + "\n", media_type="text/plain")
        answer: BaseModel = Transcription(text=text, usage=usage)
        if fields.response_format == "verbose_json":
            seconds = round(len(audio.samples) / audio.sample_rate_hz, 3)
            answer = VerboseTranscription(
                task="translate" if to_english else "transcribe",
                language="en" if to_english else fields.language or "und",
                duration=seconds,
                text=text,
                usage=UsageDuration(type="duration", seconds=seconds),
            )
        return Response(answer.model_dump_json(), media_type="application/json")

    async def _load(self, file: bytes, held: AsyncExitStack) -> AudioPart:
        try:
            return await self._media.load_recording(file, held)
        except InvalidRequestError as error:
            raise InvalidRequestError(
                f"Audio file might be corrupted or unsupported. {error.message}",
                param="file",
                code=error.code,
            ) from None


def _parse_form(form: Form, model: ModelInfo, *, to_english: bool) -> tuple[TranscriptionForm, bytes]:
    """Returns the checked fields and the file. `to_english` means a translation. Raises
    `InvalidRequestError` or `ModelNotFoundError`."""
    body, files = parse_form(form, TranscriptionForm, "file", _LISTS)
    check_model(body.model, model)
    check_transcribes(model)
    text_format = body.response_format
    if text_format is not None and text_format not in _TEXT_FORMATS:
        reason = f" ({_WHY_NOT[text_format]})" if text_format in _WHY_NOT else ""
        raise unsupported_choice("response_format", text_format, _TEXT_FORMATS, reason)
    if body.stream and to_english:
        raise unsupported("'stream' is not supported for translations.", "stream")
    if body.stream and text_format == "verbose_json":
        raise InvalidRequestError(
            "'stream' is allowed only with the response formats 'json' and 'text'.", param="stream"
        )
    if body.timestamp_granularities and text_format != "verbose_json":
        raise InvalidRequestError(
            "'timestamp_granularities' is allowed only with the response format 'verbose_json'.",
            param="timestamp_granularities[]",
        )
    if body.timestamp_granularities:
        raise unsupported(
            "'timestamp_granularities' is not supported: the model gives no timestamps.",
            "timestamp_granularities[]",
        )
    if body.include:
        raise unsupported("'include' is not supported.", "include[]")
    if body.language is not None:
        if _LANGUAGE.fullmatch(body.language) is None:
            raise InvalidRequestError(
                f"Invalid language '{body.language[:64]}'. "
                "Language parameter must be specified in ISO-639-1 format.",
                param="language",
            )
        body.language = body.language.partition("-")[0].lower()
    return body, files[-1]


async def _deltas(
    stream: AnswerStream, name: str, heartbeat_s: float | None = None
) -> AsyncGenerator[str, None]:
    """Yields text, and "" after each `heartbeat_s` s of silence."""
    last_character = ""
    is_start = True  # of a piece's text
    async with aclosing(stream), aclosing(stream.events(heartbeat_s)) as events:
        async for item in events:
            match item:
                case None:
                    yield ""
                case (_, TextDelta(text=text)):
                    text = text.lstrip() if is_start else text
                    if text:
                        yield (_separator(last_character, text) if is_start else "") + text
                        is_start, last_character = False, text[-1]
                case (_, Finished()):
                    is_start = True
    if stream.num_cut_short:
        logger.warning(
            "%s: the text of %d piece(s) ended at the model's limit of tokens", name, stream.num_cut_short
        )


def _separator(last_character: str, text: str) -> str:
    """A space between two pieces' texts, except in scripts without spaces."""
    if not last_character or last_character.isspace():
        return ""
    return "" if any(unicodedata.east_asian_width(c) in "WF" for c in (last_character, text[0])) else " "


async def _events(stream: AnswerStream, name: str, keep_alive_s: float) -> AsyncGenerator[bytes, None]:
    """Yields frames, the first with text."""
    text = ""
    async with aclosing(_deltas(stream, name, keep_alive_s)) as deltas:
        async for delta in deltas:
            text += delta
            if delta:
                yield _DELTAS.frame(delta)
            elif text:
                yield KEEP_ALIVE
    yield frame(TranscriptDone(type="transcript.text.done", text=text, usage=_usage(stream.usages)))


def _usage(usages: Sequence[Usage]) -> UsageTokens:
    prompt_tokens = sum(usage.prompt.total for usage in usages)
    audio_tokens = sum(usage.prompt.audio for usage in usages)
    text_tokens = sum(usage.text_tokens for usage in usages)
    return UsageTokens(
        type="tokens",
        input_tokens=prompt_tokens,
        input_token_details=UsageTokensInputTokenDetails(
            text_tokens=prompt_tokens - audio_tokens, audio_tokens=audio_tokens
        ),
        output_tokens=text_tokens,
        total_tokens=prompt_tokens + text_tokens,
    )


_TRANSLATION: OpenApi = {
    200: {
        "description": "The text.",
        "content": {
            "application/json": {"schema": any_of(Transcription, VerboseTranscription)},
            "text/plain": {"schema": {"type": "string"}},
        },
    },
    **GENERATION_ERRORS,
}
_TRANSCRIPTION: OpenApi = _TRANSLATION | {
    200: {
        "description": "The text; with `stream=true` as server-sent events, the last of which is "
        "`transcript.text.done`.",
        "content": _TRANSLATION[200]["content"]
        | {"text/event-stream": event_stream(TranscriptDelta, TranscriptDone)},
    }
}


def transcriptions_router(state: ServerState, config: ApiConfig, media: MediaLoader) -> APIRouter:
    router = APIRouter(prefix="/v1/audio", tags=["audio"])
    service = TranscriptionService(state, config, media)
    file = {"file": {"type": "string", "format": "binary"}}
    body = form_body(TranscriptionForm, file, "file", _LISTS)

    @router.post(
        "/transcriptions",
        summary="Transcribe an audio file",
        response_class=Response,
        responses=_TRANSCRIPTION,
        openapi_extra=body,
    )
    async def create_transcription(request: Request) -> Response:
        return await service.create(request, to_english=False)

    @router.post(
        "/translations",
        summary="Translate the speech of an audio file into English text",
        response_class=Response,
        responses=_TRANSLATION,
        openapi_extra=body,
    )
    async def create_translation(request: Request) -> Response:
        return await service.create(request, to_english=True)

    return router
