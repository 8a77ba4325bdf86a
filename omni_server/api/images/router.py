"""`POST /v1/images/generations` and `/v1/images/edits`."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Literal

from fastapi import APIRouter, Request, Response
from openai.types.images_response import UsageInputTokensDetails, UsageOutputTokensDetails
from pydantic import BaseModel

from omni_server.api.answer_stream import AnswerStream
from omni_server.api.config import ApiConfig
from omni_server.api.forms import Form, FormLimits, form_body, parse_form, read_form
from omni_server.api.image_options import MAX_PROMPT_CHARACTERS
from omni_server.api.images.files import ImageWriter, Pixels, size_of
from omni_server.api.images.parse import (
    image_output,
    image_outputs,
    image_requests,
    submit_images,
)
from omni_server.api.images.schemas import (
    CompletedEvent,
    GeneratedImage,
    ImageEditForm,
    ImageFields,
    ImageRequest,
    ImagesResponse,
    ImageUsage,
    PartialImageEvent,
)
from omni_server.api.limits import Admission
from omni_server.api.media_loader import MediaLoader
from omni_server.api.openapi import GENERATION_ERRORS, OpenApi, event_stream, request_body
from omni_server.api.state import ServerState
from omni_server.api.streaming import KEEP_ALIVE, EventStreamResponse, named_frame, until_disconnect
from omni_server.api.usage import total_usage
from omni_server.api.validation import read_json, unsupported, validate
from omni_server.errors import InvalidRequestError
from omni_server.generation import Generator
from omni_server.types import Finished, ImagePart, Usage
from omni_server.types.images import ImageDone, ImageOutput, ImageProgress, PartialImage

_EXAMPLES: dict[str, dict[str, object]] = {
    "image": {"prompt": "A lighthouse at dusk", "seed": 1},
    "events": {"prompt": "A lighthouse at dusk", "stream": True},
}

MAX_IMAGE_BYTES = 50_000_000
"""Of a file; OpenAI's limit."""
MAX_INPUT_IMAGES = 16
"""OpenAI's limit."""
_MAX_BYTES_PER_CHARACTER = 4
_EDIT_FORM_LIMITS = FormLimits(
    MAX_IMAGE_BYTES,
    max_files=MAX_INPUT_IMAGES + 2,  # a mask and a markup, which are refused
    max_field_bytes=MAX_PROMPT_CHARACTERS * _MAX_BYTES_PER_CHARACTER,
    file_param="image",
)
_IN_EDIT_FORM = {
    "lora": {
        "type": "string",
        "description": "Extension: an adapter of the model by its name, or JSON, as in a generation.",
    },
    "image": {
        "type": "array",
        "items": {"type": "string", "format": "binary"},
        "minItems": 1,
        "maxItems": MAX_INPUT_IMAGES,
    },
}

EventKind = Literal["image_generation", "image_edit"]


class ImageService:
    def __init__(
        self, state: ServerState, config: ApiConfig, admission: Admission, media: MediaLoader
    ) -> None:
        self._state = state
        self._admission = admission
        self._config = config
        self._media = media

    async def generate(self, request: Request) -> Response:
        generator = self._state.require_generator()  # before reading the body
        body = await read_json(request)
        return await until_disconnect(self._generate(generator, body), request.receive)

    async def edit(self, request: Request) -> Response:
        generator = self._state.require_generator()
        model = generator.model_info
        if model.image_features.max_input_images == 0:  # before reading megabytes of body
            raise unsupported(f"The model '{model.name}' does not edit images.", "model")
        form = await read_form(request, _EDIT_FORM_LIMITS)
        return await until_disconnect(self._edit(generator, form), request.receive)

    async def _generate(self, generator: Generator, given: object) -> Response:
        fields = validate(ImageRequest, given)
        model = generator.model_info
        output = image_output(fields, model, self._config)
        if model.image_features.needs_input_image:
            raise unsupported(
                f"The model '{model.name}' only edits images: send them to /v1/images/edits.", "model"
            )
        async with AsyncExitStack() as held:
            return await self._answer(generator, fields, output, (), "image_generation", held)

    async def _edit(self, generator: Generator, form: Form) -> Response:
        model = generator.model_info
        fields, files = parse_form(form, ImageEditForm, "image")
        max_images = min(MAX_INPUT_IMAGES, model.image_features.max_input_images)
        if len(files) > max_images:
            raise InvalidRequestError(
                f"Invalid 'image': too many files. Expected {max_images} at most, but got {len(files)}.",
                param="image",
                code="array_above_max_length",
            )
        output = image_output(fields, model, self._config)
        async with AsyncExitStack() as held:
            try:
                images = await self._media.load_images(files, fields.n or 1, held)
            except InvalidRequestError as error:
                error.param = "image"
                raise
            return await self._answer(generator, fields, output, images, "image_edit", held)

    async def _answer(
        self,
        generator: Generator,
        fields: ImageFields,
        output: ImageOutput,
        images: Sequence[ImagePart],
        kind: EventKind,
        held: AsyncExitStack,
    ) -> Response:
        """Generates all images concurrently; if one fails, the request fails. A stream takes over `held`.
        `generator` is not looked up again: a draining server still completes accepted requests. Raises
        `OmniError`."""
        model = generator.model_info
        outputs = image_outputs(output, fields.n or 1, model, images, self._config)
        self._admission.enter_choices(len(outputs))
        requests = image_requests(fields.prompt, outputs, images)
        stream = AnswerStream(generator, self._state, requests[0].request_id)
        held.push_async_callback(stream.aclose)
        await submit_images(stream, requests, {"messages": "prompt"})
        writer = ImageWriter(fields, model.name)
        if fields.stream:
            events = self._events(stream, writer, outputs[0], kind)
            first = await anext(events)
            return EventStreamResponse(requests[0].request_id, events, first=first, held=held.pop_all())
        done: dict[int, ImageDone] = {}
        async with aclosing(stream.events()) as items:
            async for item in items:
                if item is not None and isinstance(item[1], ImageDone):
                    done[item[0]] = item[1]
        generated = [done[index] for index in range(len(requests))]
        usage = total_usage(stream.usages)
        body = await asyncio.to_thread(_render, writer, generated, outputs, usage)
        return Response(body, media_type="application/json")

    async def _events(
        self, stream: AnswerStream, writer: ImageWriter, output: ImageOutput, kind: EventKind
    ) -> AsyncGenerator[bytes, None]:
        """Yields frames. The first comes with the first step, or after `sse_keep_alive_s` of waiting;
        failures before it have their own status."""

        def render(event: type[BaseModel], name: str, pixels: Pixels, **fields: object) -> bytes:
            """Takes a fraction of a second: call it in a thread."""
            data = event(
                type=f"{kind}.{name}",
                b64_json=writer.base64(pixels, output),
                background="opaque",
                created_at=int(time.time()),
                output_format=writer.format,
                quality="auto",
                size=str(size_of(pixels)),
                **fields,
            )
            return named_frame(f"{kind}.{name}", data)

        done: Pixels | None = None
        async with aclosing(stream.events(self._config.sse_keep_alive_s)) as events:
            async for item in events:
                match item:
                    case None | (_, ImageProgress()):
                        yield KEEP_ALIVE  # a step is no silence, and steps may follow for minutes
                    case (_, PartialImage(index, pixels)):
                        yield await asyncio.to_thread(
                            render, PartialImageEvent, "partial_image", pixels, partial_image_index=index
                        )
                    case (_, ImageDone(pixels)):
                        done = pixels
                    case (_, Finished(usage=usage)):
                        assert done is not None
                        yield await asyncio.to_thread(
                            render, CompletedEvent, "completed", done, usage=_image_usage(usage)
                        )


def _render(
    writer: ImageWriter, images: Sequence[ImageDone], outputs: Sequence[ImageOutput], usage: Usage
) -> bytes:
    """The response body. Takes a fraction of a second for large images."""
    files = [
        GeneratedImage(b64_json=writer.base64(image.pixels, output))
        for image, output in zip(images, outputs, strict=True)
    ]
    response = ImagesResponse(
        created=int(time.time()),
        data=files,
        output_format=writer.format,
        size=str(size_of(images[0].pixels)),
        usage=_image_usage(usage),
    )
    return response.model_dump_json().encode()


def _image_usage(usage: Usage) -> ImageUsage:
    prompt, num_generated = usage.prompt, usage.image_tokens
    return ImageUsage(
        input_tokens=prompt.total,
        input_tokens_details=UsageInputTokensDetails(image_tokens=prompt.image, text_tokens=prompt.text),
        output_tokens=num_generated,
        output_tokens_details=UsageOutputTokensDetails(image_tokens=num_generated, text_tokens=0),
        total_tokens=prompt.total + num_generated,
    )


def images_router(
    state: ServerState, config: ApiConfig, admission: Admission, media: MediaLoader
) -> APIRouter:
    router = APIRouter(prefix="/v1/images", tags=["images"])
    service = ImageService(state, config, admission, media)
    answers: OpenApi = {
        200: {
            "model": ImagesResponse,
            "description": "The images; with `stream: true` as server-sent events.",
            "content": {"text/event-stream": event_stream(PartialImageEvent, CompletedEvent)},
        },
        **GENERATION_ERRORS,
    }

    @router.post(
        "/generations",
        summary="Generate images from a prompt",
        responses=answers,
        openapi_extra=request_body(ImageRequest, _EXAMPLES),
    )
    async def create_images(request: Request) -> Response:
        return await service.generate(request)

    @router.post(
        "/edits",
        summary="Edit images, or combine several",
        responses=answers,
        openapi_extra=form_body(ImageEditForm, _IN_EDIT_FORM, "image"),
    )
    async def edit_images(request: Request) -> Response:
        return await service.edit(request)

    return router
