"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`: the thinker writes down what it hears."""

import logging
import uuid
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import replace

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from omni_server.api.config import ApiConfig
from omni_server.api.disconnect import until_disconnect
from omni_server.api.form import Form, read_form
from omni_server.api.media_loader import MediaLoader
from omni_server.api.openapi import TRANSCRIPTION_RESPONSES, TRANSLATION_RESPONSES, form_body
from omni_server.api.parse_transcription import TranscriptionJob, parse_transcription_form
from omni_server.api.recording_room import RecordingRoom
from omni_server.api.sampling import text_sampling
from omni_server.api.sse import KEEP_ALIVE, EventStreamResponse, FrameTemplate, frame
from omni_server.api.state import ServerState
from omni_server.api.stream_start import joined
from omni_server.api.transcribe import TranscribeRun
from omni_server.api.transcription_schemas import (
    DurationUsage,
    TranscriptDelta,
    TranscriptDone,
    Transcription,
    TranscriptionForm,
    VerboseTranscription,
)
from omni_server.audio.cut import cut_at_pauses
from omni_server.errors import InvalidRequestError
from omni_server.generation import Generator
from omni_server.media.source import MediaSource
from omni_server.types import AudioPart, OmniRequest, SamplingConfig, Transcribe

logger = logging.getLogger(__name__)

_PIECE_SECONDS = 30.0
"""Longer recordings are heard in pieces. Speech recognition is trained on utterances of at most this length."""

_FULL_RATE_HZ = 48_000
"""Up to this rate a recording may last for `max_upload_seconds`."""
_LONGEST_KEPT = 4
"""Recordings of the greatest size that may be in memory; of smaller ones as many more."""

_DELTAS = FrameTemplate(lambda text: TranscriptDelta(type="transcript.text.delta", delta=text))


class TranscriptionService:
    def __init__(self, state: ServerState, config: ApiConfig) -> None:
        self._state = state
        self._max_upload_bytes = config.max_upload_bytes
        self._keep_alive_s = config.sse_keep_alive_s
        max_samples = int(config.max_upload_seconds * _FULL_RATE_HZ)
        limits = replace(
            config.media_limits,
            max_bytes=config.max_upload_bytes,
            max_audio_seconds=config.max_upload_seconds,
            max_audio_samples=max_samples,
        )
        self._room = RecordingRoom(_LONGEST_KEPT * max_samples, config.media_queue_timeout_s)
        self._media = MediaLoader(
            MediaSource((), limits),
            limits,
            num_threads=config.media_threads,
            decode_timeout_s=config.media_decode_timeout_s,
            queue_timeout_s=config.media_queue_timeout_s,
        )

    async def create(self, request: Request, *, to_english: bool) -> Response:
        """No status is sent before the first words are there. Raises `OmniError`."""
        self._state.require_generator()  # rather than after many megabytes of body
        form = await read_form(request, self._max_upload_bytes)
        return await until_disconnect(self._answer(form, to_english=to_english), request.receive)

    async def _answer(self, form: Form, *, to_english: bool) -> Response:
        generator = self._state.require_generator()
        job = parse_transcription_form(form, generator.model_info, to_english=to_english)
        with ExitStack() as held:
            audio = await self._load(job.file, held)
            name = f"transcription-{uuid.uuid4().hex}"
            run = TranscribeRun(generator, self._state, _requests(generator, job, audio, name))
            if job.stream:
                events = _events(run, name, self._keep_alive_s, held.pop_all())
                first = await anext(events)
                return EventStreamResponse(name, joined(first, events), events.aclose)
            async with aclosing(run.deltas()) as deltas:
                async for _ in deltas:
                    continue
            _log_end(run, name)
            return _whole(run, job, len(audio.samples) / audio.sample_rate_hz)

    async def _load(self, file: bytes, held: ExitStack) -> AudioPart:
        """`held` gets what gives its room in memory back."""
        try:
            held.callback(await self._room.take(await self._media.count_samples(file)))
            return await self._media.load_sound_file(file)
        except InvalidRequestError as error:
            raise InvalidRequestError(
                f"Audio file might be corrupted or unsupported. {error.message}", param="file", code=error.code
            ) from None


def _requests(generator: Generator, job: TranscriptionJob, audio: AudioPart, name: str) -> list[OmniRequest]:
    sampling = text_sampling(SamplingConfig(temperature=job.temperature), generator.model_info)
    pieces = cut_at_pauses(audio.samples, audio.sample_rate_hz, _PIECE_SECONDS)
    tasks = [
        Transcribe(AudioPart(piece, audio.sample_rate_hz), job.to_english, job.language, job.hint) for piece in pieces
    ]
    return [
        OmniRequest(f"{name}-{index}", generator.task_messages(task), sampling=sampling)
        for index, task in enumerate(tasks)
    ]


async def _events(run: TranscribeRun, name: str, keep_alive_s: float, held: ExitStack) -> AsyncGenerator[bytes, None]:
    """Frames, the first when there is text. `held` is let go at the end."""
    with held:
        async with aclosing(run.deltas(keep_alive_s)) as deltas:
            async for delta in deltas:
                if delta is not None:
                    yield _DELTAS.frame(delta)
                elif run.text:
                    yield KEEP_ALIVE
        yield frame(TranscriptDone(type="transcript.text.done", text=run.text, usage=run.usage))
        _log_end(run, name)


def _whole(run: TranscribeRun, job: TranscriptionJob, seconds: float) -> Response:
    if job.text_format == "text":
        return Response(run.text + "\n", media_type="text/plain")
    body: BaseModel = Transcription(text=run.text, usage=run.usage)
    if job.text_format == "verbose_json":
        duration = round(seconds, 3)
        body = VerboseTranscription(
            task="translate" if job.to_english else "transcribe",
            language="en" if job.to_english else job.language or "und",
            duration=duration,
            text=run.text,
            usage=DurationUsage(type="duration", seconds=duration),
        )
    return Response(body.model_dump_json(), media_type="application/json")


def _log_end(run: TranscribeRun, name: str) -> None:
    if run.num_cut_short:
        logger.warning("%s: the text of %d piece(s) ended at the thinker's limit of tokens", name, run.num_cut_short)


def transcriptions_router(state: ServerState, config: ApiConfig) -> APIRouter:
    router = APIRouter(prefix="/v1/audio", tags=["audio"])
    service = TranscriptionService(state, config)
    body = form_body(TranscriptionForm)

    @router.post(
        "/transcriptions",
        summary="Write down what is said in a sound file",
        response_class=Response,
        responses=TRANSCRIPTION_RESPONSES,
        openapi_extra=body,
    )
    async def create_transcription(request: Request) -> Response:
        return await service.create(request, to_english=False)

    @router.post(
        "/translations",
        summary="Write down in English what is said in a sound file",
        response_class=Response,
        responses=TRANSLATION_RESPONSES,
        openapi_extra=body,
    )
    async def create_translation(request: Request) -> Response:
        return await service.create(request, to_english=True)

    return router
