"""`POST /v1/chat/completions`."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response

from omni_server.api.answer_stream import close_all, follow_choices, submit_all
from omni_server.api.config import ApiConfig
from omni_server.api.limits import take_places_of_choices
from omni_server.api.media_loader import MediaLoader
from omni_server.api.messages import AudioHistory
from omni_server.api.openapi import CHAT_RESPONSES, request_body
from omni_server.api.parse import ChatTurn, parse_chat_request
from omni_server.api.render import (
    Answer,
    ChoiceRenderer,
    ChunkRenderer,
    CollectedChoice,
    api_finish_reason,
    message_audio,
    render_completion,
    total_usage,
)
from omni_server.api.request_record import ANONYMOUS, current_request
from omni_server.api.schemas import ChatCompletionRequest
from omni_server.api.state import ServerState
from omni_server.api.streaming import KEEP_ALIVE, EventStreamResponse, until_disconnect
from omni_server.api.validation import read_json, validate
from omni_server.audio.encode import StreamEncoder, encode
from omni_server.generation import Generation
from omni_server.types import SAMPLE_RATE_HZ, AudioDelta, Finished, TextDelta, ToolCallDelta, Usage

_INLINE_SAMPLES = 10 * SAMPLE_RATE_HZ
"""Audio up to this length is encoded in less than a millisecond; a thread would cost more, and delay it."""


class ChatService:
    def __init__(self, state: ServerState, config: ApiConfig) -> None:
        self._state = state
        self._keep_alive_s = config.sse_keep_alive_s
        self._text_in_content = config.chat_text_in_content
        self._history = AudioHistory(config.audio_history_ttl_s, config.audio_history_entries)
        self._media = MediaLoader.from_config(config)

    async def create(self, request: Request) -> Response:
        """All that can be refused is refused before the status of a stream is sent. Raises `OmniError`."""
        self._state.require_generator()  # rather than after many megabytes of body
        body = await read_json(request)
        return await until_disconnect(self._answer(body), request.receive)

    async def _answer(self, body: object) -> Response:
        generator = self._state.require_generator()
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        turn = await parse_chat_request(
            validate(ChatCompletionRequest, body),
            request_id,
            generator.model_info,
            self._media,
            partial(self._history.transcript, _caller()),
        )
        answer = Answer(
            id=request_id,
            created=int(time.time()),
            model=generator.model_info.name,
            fingerprint=generator.model_info.fingerprint,
            audio_id=f"audio_{uuid.uuid4().hex}" if turn.audio_format is not None else None,
            text_in_content=self._text_in_content,
        )
        take_places_of_choices(len(turn.requests))
        generations = await submit_all(generator, turn.requests)
        if turn.stream:
            frames = self._frames(generations, turn, answer)
            return EventStreamResponse(request_id, frames, release=lambda: close_all(generations))
        try:
            return await self._complete(generations, turn, answer)
        finally:
            await close_all(generations)

    async def _complete(self, generations: Sequence[Generation], turn: ChatTurn, answer: Answer) -> Response:
        collected = [
            CollectedChoice(with_logprobs=turn.with_logprobs, call_finish_reason=turn.call_finish_reason)
            for _ in generations
        ]
        async with aclosing(follow_choices(generations, self._state)) as events:
            async for item in events:
                if item is not None:
                    collected[item[0]].take(item[1])
        usage = total_usage([choice.usage for choice in collected])
        spoken, audio_format = collected[0], turn.audio_format
        if audio_format is None or spoken.is_call:
            return Response(render_completion(answer, collected, None, usage), media_type="application/json")
        expires_at = self._remember(answer, spoken.text)

        def render() -> bytes:
            audio_file = encode(spoken.samples(), audio_format)
            audio = message_audio(answer, spoken.text, audio_file, expires_at)
            return render_completion(answer, collected, audio, usage)

        return Response(await asyncio.to_thread(render), media_type="application/json")

    async def _frames(
        self, generations: Sequence[Generation], turn: ChatTurn, answer: Answer
    ) -> AsyncGenerator[bytes, None]:
        """Empty ones among them are not to be sent. A failure leaves out finish reason and `[DONE]`."""
        chunks = ChunkRenderer(answer, include_usage=turn.include_usage)
        renderers = [
            ChoiceRenderer(chunks, index, may_call=turn.may_call) for index in range(len(generations))
        ]
        encoder = StreamEncoder(turn.audio_format) if turn.audio_format is not None else None
        text: list[str] = []  # of the only choice of a spoken answer
        usages: list[Usage] = []
        for renderer in renderers:
            yield renderer.opening()
        async with aclosing(follow_choices(generations, self._state, self._keep_alive_s)) as events:
            async for item in events:
                if item is None:
                    yield KEEP_ALIVE
                    continue
                renderer, event = renderers[item[0]], item[1]
                match event:
                    case TextDelta():
                        if encoder is not None:
                            text.append(event.text)
                        yield renderer.text(event.text, event.logprobs)
                    case ToolCallDelta():
                        yield renderer.tool_call(event)
                    case AudioDelta() if encoder is not None:
                        yield await _rendered_audio(renderer, encoder, event.samples)
                    case Finished():
                        usages.append(event.usage)
                        last_audio = await _last_audio(encoder) if encoder is not None else b""
                        expires_at = self._remember(answer, "".join(text))
                        reason = api_finish_reason(event.finish_reason, turn.call_finish_reason)
                        # What is there at once is sent at once: each piece costs a system call.
                        yield b"".join(renderer.closing(last_audio, expires_at, reason))
        yield b"".join(chunks.ending(total_usage(usages)))

    def _remember(self, answer: Answer, transcript: str) -> int:
        """Unix time until which the answer's `audio.id` can be used; 0 for one without audio."""
        return self._history.add(_caller(), answer.audio_id, transcript) if answer.audio_id is not None else 0


def _caller() -> str:
    """Whose request the running task serves."""
    record = current_request()
    return ANONYMOUS if record is None else record.caller


async def _rendered_audio(
    renderer: ChoiceRenderer, encoder: StreamEncoder, samples: npt.NDArray[np.float32]
) -> bytes:
    if encoder.is_quick and len(samples) <= _INLINE_SAMPLES:
        return renderer.audio(encoder.write(samples))
    return await asyncio.to_thread(lambda: renderer.audio(encoder.write(samples)))


async def _last_audio(encoder: StreamEncoder) -> bytes:
    return encoder.close() if encoder.is_quick else await asyncio.to_thread(encoder.close)


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
