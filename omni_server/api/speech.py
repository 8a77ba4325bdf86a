"""`POST /v1/audio/speech`: a text, read by a voice of the model."""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response

from omni_server.api.audio_stream import AudioStreamResponse
from omni_server.api.body import read_json
from omni_server.api.config import ApiConfig
from omni_server.api.disconnect import until_disconnect
from omni_server.api.openapi import SPEECH_RESPONSES, request_body
from omni_server.api.parse_speech import SpeechJob, parse_speech_request
from omni_server.api.read_aloud import ReadAloudRun
from omni_server.api.speech_schemas import SpeechAudioDelta, SpeechAudioDone, SpeechRequest, SpeechUsage
from omni_server.api.sse import KEEP_ALIVE, EventStreamResponse, FrameTemplate, frame
from omni_server.api.state import ServerState
from omni_server.api.stream_start import joined
from omni_server.api.validation import validate
from omni_server.audio.base64_stream import Base64Stream
from omni_server.audio.encode import StreamEncoder
from omni_server.audio.filters import TempoFilter
from omni_server.audio.formats import MEDIA_TYPES
from omni_server.types import SAMPLE_RATE_HZ

logger = logging.getLogger(__name__)

_HEADERS = {
    "x-audio-sample-rate": str(SAMPLE_RATE_HZ),
    "x-audio-channels": "1",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # keeps nginx from collecting the stream
}
_DELTAS = FrameTemplate(lambda data: SpeechAudioDelta(type="speech.audio.delta", audio=data))


class SpeechService:
    def __init__(self, state: ServerState, config: ApiConfig) -> None:
        self._state = state
        self._max_body_bytes = config.max_body_bytes
        self._keep_alive_s = config.sse_keep_alive_s

    async def create(self, request: Request) -> Response:
        """No status is sent before the first sound is there, so that whatever fails until then has one of its own.

        Raises `OmniError`.
        """
        self._state.require_generator()
        body = await read_json(request, self._max_body_bytes)
        return await until_disconnect(self._answer(body), request.receive)

    async def _answer(self, body: object) -> Response:
        generator = self._state.require_generator()
        name = f"speech-{uuid.uuid4().hex}"
        job = parse_speech_request(validate(SpeechRequest, body), name, generator)
        run = ReadAloudRun(generator, self._state, job.requests)
        if job.as_events:
            events = _events(run, job, self._keep_alive_s)
            first = await anext(events)
            return EventStreamResponse(name, joined(first, events), events.aclose)
        pieces = _file_pieces(run, job)
        first = await anext(pieces, b"")
        media_type = MEDIA_TYPES[job.audio_format]
        return AudioStreamResponse(name, joined(first, pieces), pieces.aclose, media_type=media_type, headers=_HEADERS)


class _File:
    """The audio file of one answer while it is made."""

    def __init__(self, job: SpeechJob) -> None:
        self._tempo = TempoFilter(job.speed) if job.speed != 1 else None
        self._encoder = StreamEncoder(job.audio_format)

    async def write(self, samples: npt.NDArray[np.float32]) -> bytes:
        """The next bytes of the file; there may be none yet."""
        if self._tempo is None and self._encoder.is_quick:
            return self._encoder.write(samples)
        return await asyncio.to_thread(self._write, samples)

    async def close(self) -> bytes:
        """The last bytes of the file."""
        return await asyncio.to_thread(self._close)

    def _write(self, samples: npt.NDArray[np.float32]) -> bytes:
        return self._encoder.write(samples if self._tempo is None else self._tempo.push(samples))

    def _close(self) -> bytes:
        rest = b"" if self._tempo is None else self._encoder.write(self._tempo.flush())
        return rest + self._encoder.close()


async def _file_pieces(run: ReadAloudRun, job: SpeechJob) -> AsyncGenerator[bytes, None]:
    """The file as it is made; pieces are never empty."""
    file = _File(job)
    async with aclosing(run.sound()) as sound:
        async for samples in sound:
            if samples is not None and (data := await file.write(samples)):
                yield data
    if data := await file.close():
        yield data
    _log_end(run, job.name)


async def _events(run: ReadAloudRun, job: SpeechJob, keep_alive_s: float) -> AsyncGenerator[bytes, None]:
    """Frames, the first when there is sound."""
    file = _File(job)
    base64 = Base64Stream()
    has_begun = False
    async with aclosing(run.sound(keep_alive_s)) as sound:
        async for samples in sound:
            if samples is None:
                if has_begun:
                    yield KEEP_ALIVE
            elif data := base64.push(await file.write(samples)):
                has_begun = True
                yield _DELTAS.frame(data)
    if data := base64.push(await file.close()):
        yield _DELTAS.frame(data)
    if data := base64.flush():
        yield _DELTAS.frame(data)
    usage = SpeechUsage(
        input_tokens=run.input_tokens,
        output_tokens=run.output_tokens,
        total_tokens=run.input_tokens + run.output_tokens,
    )
    yield frame(SpeechAudioDone(type="speech.audio.done", usage=usage))
    _log_end(run, job.name)


def _log_end(run: ReadAloudRun, name: str) -> None:
    if run.num_cut_short:
        logger.warning("%s: %d passage(s) ended at the talker's limit of codec tokens", name, run.num_cut_short)


def speech_router(state: ServerState, config: ApiConfig) -> APIRouter:
    router = APIRouter(tags=["audio"])
    service = SpeechService(state, config)

    @router.post(
        "/v1/audio/speech",
        summary="Read a text aloud",
        response_class=Response,
        responses=SPEECH_RESPONSES,
        openapi_extra=request_body(SpeechRequest),
    )
    async def create_speech(request: Request) -> Response:
        return await service.create(request)

    return router
