"""`POST /v1/audio/speech`: reads a text in a voice of the model."""

import asyncio
import logging
import math
import re
import unicodedata
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from omni_server.api.answer_stream import AnswerStream
from omni_server.api.audio_pace import AudioPace
from omni_server.api.config import ApiConfig
from omni_server.api.media_loader import MediaLoader
from omni_server.api.openapi import EXAMPLE_MODEL, GENERATION_ERRORS, event_stream, request_body
from omni_server.api.parse import check_model
from omni_server.api.sampling import speech_sampling
from omni_server.api.schemas import StageSamplings, Voice
from omni_server.api.state import ServerState
from omni_server.api.streaming import (
    KEEP_ALIVE,
    AudioStreamResponse,
    EventStreamResponse,
    FrameTemplate,
    frame,
    until_disconnect,
)
from omni_server.api.usage import total_usage
from omni_server.api.validation import Seed, read_json, unsupported, unsupported_choice, validate
from omni_server.api.voice_store import VoiceStore
from omni_server.api.voices import resolve_voice, sent_voice
from omni_server.audio.base64_stream import Base64Stream
from omni_server.audio.encode import StreamEncoder
from omni_server.audio.filters import TempoFilter
from omni_server.audio.formats import MEDIA_TYPES, AudioFormat, parse_format
from omni_server.errors import InvalidRequestError
from omni_server.generation import Generator
from omni_server.types import (
    SAMPLE_RATE_HZ,
    AudioDelta,
    ClonedVoice,
    ModelInfo,
    OmniRequest,
    ReadAloud,
    SamplingConfig,
    SpeechOutput,
    TextAlignment,
)

logger = logging.getLogger(__name__)

MAX_INSTRUCTIONS = 4096
"""OpenAI's limit."""
SPEECH_FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")

_DECLARING_FORMATS = ("wav", "flac")
"""Readers expect the file's length in its header."""
_SLICE_BYTES = 256 * 1024
_HEADERS = {"x-audio-sample-rate": str(SAMPLE_RATE_HZ), "x-audio-channels": "1"}


class SpeechRequest(BaseModel):
    """Fields that are not listed are accepted and ignored, as clients send many."""

    model_config = ConfigDict(strict=True, extra="allow", use_attribute_docstrings=True)

    model: str
    input: Annotated[str, Field(json_schema_extra={"pattern": r"\S"})]
    """The text to read; not only white space and control characters. Up to 4096 characters, or
    `--max-speech-characters`."""
    voice: Voice | None = None
    """A voice of the model or one of OpenAI's names; without one, the model's default voice."""
    instructions: Annotated[str, Field(json_schema_extra={"maxLength": MAX_INSTRUCTIONS})] | None = None
    """How to read it. "None" and the empty string count as absent: Home Assistant sends the former."""
    language: Annotated[str, Field(max_length=64)] | None = None
    """Extension: the language of the text, by name or ISO 639-1 code, for models that are told; "auto" is the
    default."""
    ref_audio: str | None = None
    """Extension, for models that clone voices, as the next ones: URL of a recording of the voice to speak
    with, instead of `voice`; as in chats, a data URL or one of an allowed host."""
    ref_text: Annotated[str, Field(max_length=MAX_INSTRUCTIONS)] | None = None
    """Extension: what is said in `ref_audio`. With it, speech continues the recording and resembles it more;
    without, it has its voice."""
    x_vector_only_mode: bool | None = None
    """Extension: take the voice only, even if the words of the recording are known."""
    speaker_embedding: Annotated[list[float], Field(max_length=8192, fail_fast=True)] | None = None
    """Extension: a voice as the model's own vector, instead of `ref_audio`."""
    must_end: bool | None = None
    """Extension: speech that has not ended at its limit of codec tokens is an error, instead of a file that
    stops there. The limit follows from the text's length."""
    non_streaming_mode: bool | None = None
    """Extension, for models that read: whether the model gets all of the text before it speaks; the default
    is that of its reference."""
    response_format: Annotated[str, Field(json_schema_extra={"enum": [*SPEECH_FORMATS, "pcm16"]})] | None = (
        None
    )
    """`mp3` is the default; `pcm`, also called `pcm16`, is 24 kHz, mono, 16 bit, little-endian."""
    speed: Annotated[float, Field(ge=0.25, le=4.0)] | None = None
    """How many times as fast as the model speaks, at the same pitch; 1 is the default."""
    stream_format: Literal["audio", "sse"] | None = None
    """`audio` is the default. Given, it asks for a stream, as `stream` does."""
    stream: bool | None = None
    """Extension: whether the file is sent while it is made, or once it is complete, with a Content-Length. By
    default, only WAV and FLAC files, which declare their length then, are sent once they are complete."""
    seed: Seed | None = None
    """Extension: makes the speech repeatable."""
    stage_sampling: StageSamplings | None = None
    """Extension: sampling of the stage that samples codec tokens, by its name, as `{"talker": {...}}`."""


class SpeechAudioDelta(BaseModel):
    type: Literal["speech.audio.delta"]
    audio: str
    """Base64 of the next bytes of the file."""


class SpeechUsage(BaseModel):
    input_tokens: int
    """Tokens of the model's prompts, which contain the text and the request to read it."""
    output_tokens: int
    """Codec tokens of the speech."""
    total_tokens: int


class SpeechAudioDone(BaseModel):
    type: Literal["speech.audio.done"]
    finish_reason: Literal["stop", "length"]
    """Extension: `length` if a passage of the text has reached its limit of codec tokens."""
    usage: SpeechUsage


_DELTAS = FrameTemplate(lambda data: SpeechAudioDelta(type="speech.audio.delta", audio=data))

LONGEST_PASSAGE = 600
"""About 40 s of speech. Models that chat were trained on replies of at most a minute or two."""
_COST_PER_SECOND = 15
"""Latin letters spoken per second."""
_SHARE_OF_LIMIT = 0.5
"""Of the model's limit, for a passage's estimated speech: some voices are slower, some words are
spelled."""
_WIDE_COST = 3
"""Chinese, Japanese and Korean characters are syllables."""
_DIGIT_COST = 5
"""Each is a word."""

# From the best place to cut to the worst; the cut is after the match.
_CUTS = (
    re.compile(r"\n\s*\n"),
    re.compile(r"[.!?…][\"'”’»)\]]*\s+|[。！？][」』”’）]*"),
    re.compile(r"[,;:–—]\s+|[，；：、]|\n"),
    re.compile(r"\s+"),
)
_ZERO_WIDTH_JOINER = "\u200d"


async def _answer(state: ServerState, config: ApiConfig, media: MediaLoader, given: object) -> Response:
    """Sends no status before the first audio, or the whole file, is ready, so that earlier failures get their
    own status.

    Raises `OmniError`.
    """
    generator = state.require_generator()
    name = f"speech-{uuid.uuid4().hex}"
    body = validate(SpeechRequest, given)
    check_model(body.model, generator.model_info)
    requests, audio_format = parse_speech(body, name, generator, config.max_speech_characters)
    requests = in_voice(requests, await requested_clone(body, generator, media, state.voices))
    speed = 1.0 if body.speed is None else body.speed
    stream = AnswerStream(generator, state, name, one_by_one=requests, input_param="input")
    pace = state.audio_pace(speed)
    if body.stream_format == "sse":
        pieces = audio_pieces(stream, name, audio_format, speed, pace, config.sse_keep_alive_s)
        events = _events(stream, pieces)
        return EventStreamResponse(name, events, first=await anext(events))
    is_whole = body.stream is False or (
        body.stream is None and body.stream_format is None and audio_format in _DECLARING_FORMATS
    )
    pieces = audio_pieces(stream, name, audio_format, speed, None if is_whole else pace, is_whole=is_whole)
    first = await anext(pieces, b"")
    headers = _HEADERS | {"content-length": str(len(stream.file))} if is_whole else _HEADERS
    return AudioStreamResponse(
        name, pieces, first=first, media_type=MEDIA_TYPES[audio_format], headers=headers
    )


async def _events(stream: AnswerStream, pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yields the pieces of the file as server-sent events. The first has audio."""
    base64, has_begun = Base64Stream(), False
    async with aclosing(pieces):
        async for data in pieces:
            if text := base64.push(data):
                has_begun = True
                yield _DELTAS.frame(text)
            elif has_begun:
                yield KEEP_ALIVE
    reason, usage = end_of(stream)
    done = frame(SpeechAudioDone(type="speech.audio.done", finish_reason=reason, usage=usage))
    yield _DELTAS.frame(rest) + done if (rest := base64.flush()) else done


def end_of(stream: AnswerStream) -> tuple[Literal["stop", "length"], SpeechUsage]:
    """Why the speech has ended, and what it took."""
    total = total_usage(stream.usages, num_choices=1)
    usage = SpeechUsage(
        input_tokens=total.prompt.total,
        output_tokens=total.codec_tokens,
        total_tokens=total.prompt.total + total.codec_tokens,
    )
    return "length" if stream.num_cut_short else "stop", usage


async def audio_pieces(
    stream: AnswerStream,
    name: str,
    audio_format: AudioFormat,
    speed: float,
    pace: AudioPace | None,
    heartbeat_s: float | None = None,
    *,
    is_whole: bool = False,
    on_alignment: Callable[[TextAlignment], None] = lambda _: None,
) -> AsyncGenerator[bytes, None]:
    """Yields the audio file as it is made, and an empty piece after `heartbeat_s` seconds of silence. A whole
    file is yielded once it is complete, and `stream` holds it: a client that reads slowly can lose the
    rest."""
    tempo = TempoFilter(speed) if speed != 1 else None
    encoder = StreamEncoder(audio_format, is_whole=is_whole)

    def write(samples: npt.NDArray[np.float32]) -> bytes:
        return encoder.write(samples if tempo is None else tempo.push(samples))

    def close() -> bytes:
        rest = b"" if tempo is None else encoder.write(tempo.flush())
        return rest + encoder.close()

    async with aclosing(stream):
        async with aclosing(stream.events(heartbeat_s, pace)) as events:
            async for item in events:
                if item is None:
                    yield b""
                elif isinstance(item[1], TextAlignment):
                    on_alignment(item[1])
                elif isinstance(item[1], AudioDelta) and item[1].samples.size:
                    is_quick = tempo is None and encoder.is_quick
                    samples = item[1].samples
                    data = write(samples) if is_quick else await asyncio.to_thread(write, samples)
                    stream.hold(encoder.num_kept)
                    if data:
                        yield data
        if stream.num_cut_short:
            logger.warning("%s: %d passage(s) ended at the limit of codec tokens", name, stream.num_cut_short)
        if is_whole:
            stream.file = await asyncio.to_thread(close)
            for begin in range(0, len(stream.file), _SLICE_BYTES):
                stream.hold(len(stream.file))
                yield stream.file[begin : begin + _SLICE_BYTES]
        elif data := await asyncio.to_thread(close):
            yield data


def in_voice(requests: Sequence[OmniRequest], clone: ClonedVoice | None) -> list[OmniRequest]:
    """Returns requests for speech in the cloned voice; None leaves them as they are."""
    return [
        request if clone is None else replace(request, speech=replace(request.speech, clone=clone))
        for request in requests
        if request.speech is not None
    ]


async def requested_clone(
    body: SpeechRequest, generator: Generator, media: MediaLoader, voices: VoiceStore
) -> ClonedVoice | None:
    """Returns the voice that the request brings or that was sent earlier, if any. Raises `OmniError`."""
    text = (body.ref_text or "").strip()
    brought = {
        "ref_audio": body.ref_audio,
        "speaker_embedding": body.speaker_embedding,
        "ref_text": text or None,
    }
    given = [field for field, value in brought.items() if value is not None]
    if not generator.model_info.clones_voices:
        if given:
            raise unsupported("This model clones no voices.", given[0])
        return None
    if not given:
        sent = sent_voice(body.voice, voices, "voice").clone
        return ClonedVoice(sent.vector) if body.x_vector_only_mode else sent
    if body.speaker_embedding is not None and given == ["speaker_embedding"]:
        return ClonedVoice(np.array(body.speaker_embedding, np.float32).tobytes())
    if body.ref_audio is None or body.speaker_embedding is not None:
        raise InvalidRequestError(
            "A voice is one of 'ref_audio', which may have 'ref_text', and 'speaker_embedding'.",
            param=given[0],
        )
    try:
        recording = await media.load_voice(body.ref_audio)
        return await generator.clone_voice(recording, "" if body.x_vector_only_mode else text)
    except InvalidRequestError as error:
        error.param = "ref_audio"
        raise


def parse_speech(
    body: SpeechRequest,
    name: str,
    generator: Generator,
    max_characters: int,
) -> tuple[list[OmniRequest], AudioFormat]:
    """Checks rules across fields and those of the model, except for cloned voices. Returns one or more
    requests, whose ids contain `name` and whose audio is concatenated.

    Raises `InvalidRequestError` or `ModelNotFoundError`.
    """
    model = generator.model_info
    speech, sampling, audio_format = parse_without_text(body, model)
    _check_length(body.input, "input", max_characters, ". --max-speech-characters sets the server's limit")
    longest = math.inf if model.reads_text else LONGEST_PASSAGE
    if model.about is not None and model.about.longest_passage is not None:
        longest = min(longest, model.about.longest_passage)
    texts = passages(body.input, model.longest_speech_s, longest)
    if not any(character.isprintable() and not character.isspace() for character in body.input):
        raise InvalidRequestError(
            "Invalid 'input': there is no text to read.", param="input", code="empty_string"
        )
    requests = [
        OmniRequest(
            request_id=f"{name}-{index}",
            messages=generator.task_messages(ReadAloud(text, speech.instructions)),
            speech=replace(speech, text=text),
            sampling=sampling,
        )
        for index, text in enumerate(texts)
    ]
    return requests, audio_format


def parse_without_text(
    body: SpeechRequest, model: ModelInfo
) -> tuple[SpeechOutput, Mapping[str, SamplingConfig], AudioFormat]:
    """The part of `parse_speech` that does not depend on the text. Raises `InvalidRequestError`."""
    for field in body.model_extra or {}:
        logger.debug("ignoring the unknown field %.64r", field)
    if not model.voices:
        others = "text" if "text" in model.outputs else "images"
        raise unsupported(f"This model answers with {others} only.", "model")
    named = None if model.clones_voices else body.voice
    voice = model.default_voice if named is None else resolve_voice(named, model, "voice")
    format_name = "mp3" if body.response_format is None else body.response_format
    audio_format = parse_format(format_name)
    if audio_format is None:
        raise unsupported_choice("response_format", format_name, SPEECH_FORMATS)
    instructions = None if body.instructions is None else body.instructions.strip()
    if instructions in ("", "None"):
        instructions = None
    elif body.instructions is not None:
        _check_length(body.instructions, "instructions", MAX_INSTRUCTIONS)
    speech = SpeechOutput(
        voice=voice,
        seed=body.seed % 2**63 if body.seed is not None else None,  # as in chat completions
        language=body.language,
        instructions=instructions,
        text_first=body.non_streaming_mode,
        must_end=bool(body.must_end),
    )
    return speech, speech_sampling(body.stage_sampling, body.seed, model), audio_format


def _check_length(text: str, param: str, limit: int, hint: str = "") -> None:
    if len(text) > limit:
        raise InvalidRequestError(
            f"Invalid '{param}': string too long. Expected a string with maximum length {limit}, "
            f"but got a string with length {len(text)} instead{hint}.",
            param=param,
            code="string_above_max_length",
        )


def passages(text: str, longest_speech_s: float, longest_passage: float = LONGEST_PASSAGE) -> list[str]:
    """Splits `text` into passages that are not too long, at pauses in speech if possible; none is blank.

    Only white space at the cuts and at both ends is lost. `longest_speech_s` is the longest speech stream of
    the model, at whose end it stops. `longest_passage` is in Latin letters.
    """
    found: list[str] = []
    rest = text.strip()
    max_cost = min(longest_passage, _SHARE_OF_LIMIT * longest_speech_s * _COST_PER_SECOND)
    while (limit := _fitting(rest, max_cost)) < len(rest):
        cut = _cut(rest, limit)
        found.append(rest[:cut].strip())
        rest = rest[cut:].strip()
    return [*found, rest] if rest else found


def _fitting(text: str, max_cost: float) -> int:
    """The number of leading characters that fit."""
    cost = 0
    for index, character in enumerate(text):
        if character.isdigit():
            cost += _DIGIT_COST
        else:
            cost += _WIDE_COST if unicodedata.east_asian_width(character) in "WF" else 1
        if cost > max_cost:
            return max(1, index)
    return len(text)


def _cut(text: str, limit: int) -> int:
    """Finds the end of the passage, in the second half of what fits, to avoid many short
    passages."""
    for pattern in _CUTS:
        ends = [match.end() for match in pattern.finditer(text, 0, limit) if match.end() > limit // 2]
        if ends:
            return ends[-1]
    for cut in range(limit, limit // 2, -1):
        if not _belong_together(text[cut - 1], text[cut]):
            return cut
    return limit


def _belong_together(before: str, after: str) -> bool:
    """Whether both are part of one visible character."""
    return _ZERO_WIDTH_JOINER in (before, after) or unicodedata.category(after) in ("Mn", "Mc", "Me", "Sk")


_EXAMPLES: dict[str, dict[str, object]] = {
    "file": {"model": EXAMPLE_MODEL, "input": "Hello, world.", "voice": "alloy", "response_format": "wav"},
    "events": {
        "model": EXAMPLE_MODEL,
        "input": "Hello, world.",
        "stream_format": "sse",
        "response_format": "pcm",
    },
}


def speech_router(state: ServerState, config: ApiConfig, media: MediaLoader) -> APIRouter:
    router = APIRouter(tags=["audio"])

    @router.post(
        "/v1/audio/speech",
        summary="Read a text aloud",
        response_class=Response,
        responses={
            200: {
                "description": "The file, sent while it is made, or once it is complete (see `stream`); or, "
                "with `stream_format: sse`, its bytes as server-sent events, the last of which is "
                "`speech.audio.done`.",
                "headers": {
                    name: {"$ref": f"#/components/headers/{name}"}
                    for name in ("X-Audio-Sample-Rate", "X-Audio-Channels")
                },
                "content": {
                    media_type: {"schema": {"type": "string", "format": "binary"}}
                    for media_type in MEDIA_TYPES.values()
                }
                | {"text/event-stream": event_stream(SpeechAudioDelta, SpeechAudioDone)},
            },
            **GENERATION_ERRORS,
        },
        openapi_extra=request_body(SpeechRequest, _EXAMPLES),
    )
    async def create_speech(request: Request) -> Response:
        state.require_generator()
        body = await read_json(request)
        return await until_disconnect(_answer(state, config, media, body), request.receive)

    return router
