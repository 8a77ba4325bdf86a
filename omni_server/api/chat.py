"""`POST /v1/chat/completions`."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response

from omni_server.api.audio_history import AudioHistory
from omni_server.api.body import read_json
from omni_server.api.config import ApiConfig
from omni_server.api.disconnect import until_disconnect
from omni_server.api.errors import envelope, unexpected_error
from omni_server.api.event_feed import follow
from omni_server.api.media_loader import MediaLoader
from omni_server.api.openapi import CHAT_RESPONSES, request_body
from omni_server.api.parse import ChatTurn, parse_chat_request
from omni_server.api.render import Answer, StreamRenderer, render_completion
from omni_server.api.schemas import ChatCompletionRequest
from omni_server.api.sse import KEEP_ALIVE, EventStreamResponse, frame
from omni_server.api.state import ServerState
from omni_server.api.validation import validate
from omni_server.audio.encode import StreamEncoder, encode
from omni_server.errors import OmniError
from omni_server.generation import Generation
from omni_server.media.source import MediaSource
from omni_server.types import SAMPLE_RATE_HZ, AudioDelta, Finished, TextDelta

logger = logging.getLogger(__name__)

_INLINE_SAMPLES = 10 * SAMPLE_RATE_HZ
"""Sound up to this length is encoded in less than a millisecond; a thread would cost more, and delay it."""

_SILENCE: npt.NDArray[np.float32] = np.zeros(0, dtype=np.float32)


class ChatService:
    def __init__(self, state: ServerState, config: ApiConfig) -> None:
        self._state = state
        self._max_body_bytes = config.max_body_bytes
        self._keep_alive_s = config.sse_keep_alive_s
        self._history = AudioHistory(config.audio_history_ttl_s, config.audio_history_entries)
        self._media = MediaLoader(
            MediaSource(config.allowed_media_domains, config.media_limits, config.allowed_local_media_path),
            config.media_limits,
            num_threads=config.media_threads,
            decode_timeout_s=config.media_decode_timeout_s,
            queue_timeout_s=config.media_queue_timeout_s,
        )

    async def create(self, request: Request) -> Response:
        """All that can be refused is refused before the status of a stream is sent. Raises `OmniError`."""
        self._state.require_generator()  # rather than after many megabytes of body
        body = await read_json(request, self._max_body_bytes)
        return await until_disconnect(self._answer(body), request.receive)

    async def _answer(self, body: object) -> Response:
        generator = self._state.require_generator()
        turn = await parse_chat_request(
            validate(ChatCompletionRequest, body),
            f"chatcmpl-{uuid.uuid4().hex}",
            generator.model_info,
            self._media,
            self._history,
        )
        answer = Answer(
            id=turn.request.request_id,
            created=int(time.time()),
            model=generator.model_info.name,
            audio_id=f"audio_{uuid.uuid4().hex}" if turn.audio_format is not None else None,
        )
        generation = await generator.submit(turn.request)
        if turn.stream:
            return EventStreamResponse(self._frames(generation, turn, answer), generation.aclose)
        try:
            return await self._complete(generation, turn, answer)
        finally:
            await generation.aclose()

    async def _complete(self, generation: Generation, turn: ChatTurn, answer: Answer) -> Response:
        text: list[str] = []
        audio: list[npt.NDArray[np.float32]] = [_SILENCE]
        async with aclosing(follow(generation, self._state)) as events:
            async for event in events:
                match event:
                    case TextDelta():
                        text.append(event.text)
                    case AudioDelta():
                        audio.append(event.samples)
                    case Finished():
                        finished = event
        transcript = "".join(text)
        expires_at = self._remember(answer, transcript)

        def render() -> bytes:
            audio_file = encode(np.concatenate(audio), turn.audio_format) if turn.audio_format is not None else None
            return render_completion(answer, transcript, audio_file, expires_at, finished)

        return Response(await asyncio.to_thread(render), media_type="application/json")

    async def _frames(self, generation: Generation, turn: ChatTurn, answer: Answer) -> AsyncGenerator[bytes, None]:
        """A failure ends the stream with one frame that holds the error, without a finish reason and `[DONE]`."""
        try:
            async with aclosing(self._answer_frames(generation, turn, answer)) as frames:
                async for data in frames:
                    if data:
                        yield data
        except OmniError as error:
            logger.info("%s failed while it was streamed: %s", answer.id, error)
            yield frame(envelope(error))
        except Exception:
            logger.exception("%s failed while it was streamed", answer.id)
            yield frame(envelope(unexpected_error()))

    async def _answer_frames(
        self, generation: Generation, turn: ChatTurn, answer: Answer
    ) -> AsyncGenerator[bytes, None]:
        renderer = StreamRenderer(answer, include_usage=turn.include_usage)
        encoder = StreamEncoder(turn.audio_format) if turn.audio_format is not None else None
        text: list[str] = []
        yield renderer.opening()
        async with aclosing(follow(generation, self._state, self._keep_alive_s)) as events:
            async for event in events:
                match event:
                    case None:
                        yield KEEP_ALIVE
                    case TextDelta():
                        text.append(event.text)
                        yield renderer.text(event.text)
                    case AudioDelta() if encoder is not None:
                        yield await _rendered_audio(renderer, encoder, event.samples)
                    case Finished():
                        last_audio = encoder.close() if encoder is not None else b""
                        expires_at = self._remember(answer, "".join(text))
                        for data in renderer.closing(last_audio, expires_at, event):
                            yield data

    def _remember(self, answer: Answer, transcript: str) -> int:
        """Unix time until which the answer's `audio.id` can be used; 0 for one without sound."""
        return self._history.add(answer.audio_id, transcript) if answer.audio_id is not None else 0


async def _rendered_audio(renderer: StreamRenderer, encoder: StreamEncoder, samples: npt.NDArray[np.float32]) -> bytes:
    if len(samples) <= _INLINE_SAMPLES:
        return renderer.audio(encoder.write(samples))
    return await asyncio.to_thread(lambda: renderer.audio(encoder.write(samples)))


def chat_router(state: ServerState, config: ApiConfig) -> APIRouter:
    router = APIRouter(tags=["chat"])
    service = ChatService(state, config)

    @router.post(
        "/v1/chat/completions",
        summary="Answer a conversation with text, or with text and speech",
        responses=CHAT_RESPONSES,
        openapi_extra=request_body(ChatCompletionRequest),
    )
    async def create_chat_completion(request: Request) -> Response:
        return await service.create(request)

    return router
