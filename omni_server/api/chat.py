"""`POST /v1/chat/completions`."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response

from omni_server.api.answer_store import AnswerStore
from omni_server.api.answer_stream import AnswerStream
from omni_server.api.chat_image import file_options, image_output, load_image_prompt, with_images
from omni_server.api.config import ApiConfig
from omni_server.api.image_options import ImageOptions
from omni_server.api.images.files import data_url
from omni_server.api.images.parse import submit_images
from omni_server.api.limits import Admission
from omni_server.api.media_loader import MediaLoader
from omni_server.api.messages import load_messages
from omni_server.api.openapi import EXAMPLE_MODEL, GENERATION_ERRORS, event_stream, request_body
from omni_server.api.parse import check_model, parse_chat_request
from omni_server.api.render import (
    Answer,
    ChatCompletion,
    ChatCompletionChunk,
    ChoiceRenderer,
    CollectedChoice,
    render_completion,
)
from omni_server.api.schemas import ChatCompletionRequest, NamedTool
from omni_server.api.state import ServerState
from omni_server.api.streaming import KEEP_ALIVE, EventStreamResponse, until_disconnect
from omni_server.api.usage import total_usage
from omni_server.api.validation import read_json, validate
from omni_server.audio.encode import StreamEncoder, encode
from omni_server.audio.formats import AudioFormat
from omni_server.types import (
    SAMPLE_RATE_HZ,
    AudioDelta,
    ChatMessage,
    Finished,
    ModelInfo,
    TextDelta,
    ToolCallDelta,
)
from omni_server.types.images import ImageDone, ImageOutput, ImageProgress

_INLINE_SAMPLES = 10 * SAMPLE_RATE_HZ
"""Encoding audio up to this length takes less than a millisecond; a thread would add cost and delay."""


@dataclass(frozen=True)
class OpenedAnswer:
    """An answer that the engines have begun."""

    stream: AnswerStream
    num_choices: int
    model: ModelInfo
    audio_format: AudioFormat | None
    """None for an answer without speech."""
    image: ImageOutput | None
    """None unless the answer is an image."""


class ChatService:
    def __init__(
        self,
        state: ServerState,
        config: ApiConfig,
        admission: Admission,
        media: MediaLoader,
        store: AnswerStore,
    ) -> None:
        self._state = state
        self._admission = admission
        self._config = config
        self._store = store
        self._media = media

    # Requests are refused only before the status of a stream is sent.
    async def create_chat_completion(self, request: Request) -> Response:
        self._state.require_generator()  # before reading megabytes of body
        body = await read_json(request)
        return await until_disconnect(self._answer(body), request.receive)

    async def _answer(self, body: object) -> Response:
        async with AsyncExitStack() as held:
            return await self._answer_holding(body, held)

    async def _answer_holding(self, body: object, held: AsyncExitStack) -> Response:
        """Adds what the answer holds to `held`; a stream takes it over."""
        request, request_id = validate(ChatCompletionRequest, body), f"chatcmpl-{uuid.uuid4().hex}"
        opened = await self.open(request, request_id, held)
        answer = Answer(
            id=request_id,
            created=int(time.time()),
            model=opened.model.name,
            fingerprint=opened.model.fingerprint,
            audio_format=opened.audio_format,
            audio_id=f"audio_{uuid.uuid4().hex}" if opened.audio_format is not None else None,
            text_in_content=self._config.chat_text_in_content,
            include_usage=request.stream_options is not None and request.stream_options.include_usage is True,
            image=None if opened.image is None else file_options(request),
            call_finish_reason="stop" if isinstance(request.tool_choice, NamedTool) else "tool_calls",
        )
        if request.stream:
            renderers = [
                ChoiceRenderer(answer, index, may_call=request.tools is not None)
                for index in range(opened.num_choices)
            ]
            return EventStreamResponse(
                request_id, self._frames(opened.stream, answer, renderers), held=held.pop_all()
            )
        collected = [
            CollectedChoice(with_logprobs=request.logprobs is True) for _ in range(opened.num_choices)
        ]
        return await self._complete(opened.stream, answer, collected)

    async def open(
        self,
        request: ChatCompletionRequest,
        request_id: str,
        held: AsyncExitStack,
        *,
        truncates: bool = False,
    ) -> OpenedAnswer:
        """Checks the request and submits all choices. Adds what the answer holds to `held`. `truncates` as in
        `AnswerStream.submit`."""
        generator = self._state.require_generator()
        model = generator.model_info
        check_model(request.model, model)
        image = image_output(request, model, self._config)
        choices, audio_format = await parse_chat_request(
            request,
            request_id,
            model,
            self._state.voices,
            lambda hears_videos: self._load(request, model, held, hears_videos),
        )
        if image is not None:
            choices = with_images(choices, image, model, self._config)
        self._admission.enter_choices(len(choices))
        stream = AnswerStream(generator, self._state, request_id)
        held.push_async_callback(stream.aclose)
        if image is None:
            for choice in choices:
                await stream.submit(choice, truncates=truncates)
        else:
            await submit_images(stream, choices, {"image": "messages"})
        return OpenedAnswer(stream, len(choices), model, audio_format, image)

    async def _load(
        self, request: ChatCompletionRequest, model: ModelInfo, held: AsyncExitStack, hears_videos: bool
    ) -> tuple[ChatMessage, ...]:
        if model.only_generates_images:
            return await load_image_prompt(request, model, self._media, held)
        return await load_messages(
            request.messages, model, self._media, self._store, hears_videos=hears_videos
        )

    async def _complete(
        self, stream: AnswerStream, answer: Answer, collected: list[CollectedChoice]
    ) -> Response:
        async with aclosing(stream.events()) as events:
            async for item in events:
                if item is not None:
                    collected[item[0]].take(item[1])
        if answer.image is not None:
            body = await asyncio.to_thread(render_completion, answer, collected)
            return Response(body, media_type="application/json")
        spoken, audio_format = collected[0], answer.audio_format
        if audio_format is None or spoken.is_call:
            return Response(render_completion(answer, collected), media_type="application/json")
        expires_at = self._remember(answer, spoken.text)

        def render() -> bytes:
            audio_file = encode(spoken.samples(), audio_format)
            return render_completion(answer, collected, audio_file, expires_at)

        return Response(await asyncio.to_thread(render), media_type="application/json")

    async def _frames(
        self, stream: AnswerStream, answer: Answer, renderers: list[ChoiceRenderer]
    ) -> AsyncGenerator[bytes, None]:
        """Callers must skip empty frames. After a failure, finish reason and `[DONE]` are missing."""
        encoder = StreamEncoder(answer.audio_format) if answer.audio_format is not None else None
        text: list[str] = []  # spoken answers have one choice
        for renderer in renderers:
            yield renderer.opening()
        heartbeat_s, pace = self._config.sse_keep_alive_s, self._state.audio_pace()
        async with aclosing(stream.events(heartbeat_s, pace)) as events:
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
                    case ImageProgress():  # a step is no silence, and steps may follow for minutes
                        yield KEEP_ALIVE
                    case ImageDone() if answer.image is not None:
                        yield await asyncio.to_thread(_rendered_image, renderer, event, answer.image)
                    case AudioDelta() if encoder is not None:
                        yield renderer.audio(await encoded(encoder, event.samples))
                    case Finished():
                        last_audio = await last_encoded(encoder) if encoder is not None else b""
                        expires_at = self._remember(answer, "".join(text))
                        reason = answer.finish_reason(event.finish_reason)
                        # Send the closing frames together: each piece costs a system call.
                        yield b"".join(renderer.closing(last_audio, expires_at, reason))
        yield b"".join(answer.ending(total_usage(stream.usages)))

    def _remember(self, answer: Answer, transcript: str) -> int:
        """Returns the Unix time at which the answer's `audio.id` expires, or 0 without audio."""
        return self._store.add(answer.audio_id, transcript.encode()) if answer.audio_id is not None else 0


async def encoded(encoder: StreamEncoder, samples: npt.NDArray[np.float32]) -> bytes:
    if encoder.is_quick and len(samples) <= _INLINE_SAMPLES:
        return encoder.write(samples)
    return await asyncio.to_thread(encoder.write, samples)


def _rendered_image(renderer: ChoiceRenderer, image: ImageDone, options: ImageOptions) -> bytes:
    """Takes a fraction of a second for a large image."""
    return renderer.image(data_url(image.pixels, options))


async def last_encoded(encoder: StreamEncoder) -> bytes:
    return encoder.close() if encoder.is_quick else await asyncio.to_thread(encoder.close)


def _chat(text: str, **fields: object) -> dict[str, object]:
    return {"model": EXAMPLE_MODEL, "messages": [{"role": "user", "content": text}], **fields}


_CITY: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}

_EXAMPLES: dict[str, dict[str, object]] = {
    "text": _chat("What is the capital of France?", max_completion_tokens=64),
    "speech": _chat(
        "What is the capital of France?",
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "wav"},
    ),
    "image": _chat("A lighthouse at dusk", modalities=["image"], size="1024x1024", seed=1),
    "streamed speech": _chat(
        "What is the capital of France?",
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "pcm16"},
        stream=True,
        stream_options={"include_usage": True},
    ),
    "JSON": _chat(
        "What is the capital of France?",
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": _CITY}},
    ),
    "tool": _chat(
        "What is the weather in Paris?",
        tools=[{"type": "function", "function": {"name": "weather", "parameters": _CITY}}],
    ),
    "log-probabilities": _chat("Say yes or no.", logprobs=True, top_logprobs=2, temperature=0, n=2),
}


def chat_router(chats: ChatService) -> APIRouter:
    router = APIRouter(tags=["chat"])
    router.post(
        "/v1/chat/completions",
        summary="Answer a conversation with text, and with speech or an image",
        responses={
            200: {
                "model": ChatCompletion,
                "description": "The answer; with `stream: true` as server-sent events, "
                "the last of which is `[DONE]`.",
                "content": {"text/event-stream": event_stream(ChatCompletionChunk, last="[DONE]")},
            },
            **GENERATION_ERRORS,
        },
        openapi_extra=request_body(ChatCompletionRequest, _EXAMPLES),
    )(chats.create_chat_completion)
    return router
