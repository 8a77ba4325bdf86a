"""`POST /v1/images/generations`."""

import asyncio
import base64
import io
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field

from omni_server.api.answer_stream import close_all, follow_choices, submit_all
from omni_server.api.limits import Admission
from omni_server.api.openapi import GENERATION_ERRORS, request_body
from omni_server.api.parse import check_extra_fields, check_model
from omni_server.api.schemas import Seed
from omni_server.api.state import ServerState
from omni_server.api.streaming import until_disconnect
from omni_server.api.validation import Integer, read_json, unsupported, unsupported_choice, validate
from omni_server.errors import InvalidRequestError
from omni_server.types import (
    ChatMessage,
    ImageDone,
    ImageOutput,
    ImageSize,
    ModelInfo,
    OmniRequest,
    TextPart,
)

MAX_IMAGES = 10
"""Per request; OpenAI's limit."""
MAX_PROMPT_CHARACTERS = 32_000
"""OpenAI's limit."""

ImageFormat = Literal["png", "jpeg", "webp"]


class ImageRequest(BaseModel):
    """Fields that are not listed are accepted and ignored, as clients send many, except for those that would
    change the image (`omni_server.api.images`)."""

    model_config = ConfigDict(strict=True, extra="allow", use_attribute_docstrings=True)

    model: str | None = None
    """The served model is the default."""
    prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS, json_schema_extra={"pattern": r"\S"})]
    """What the image shows; not only white space."""
    n: Annotated[Integer, Field(ge=1, le=MAX_IMAGES)] | None = None
    """How many images; 1 is the default. With a seed, the second image has the next seed, and so on."""
    size: Annotated[str, Field(examples=["auto", "1024x1024"])] | None = None
    """Width and height in pixels, of those that the model offers; `auto`, the default, is the model's."""
    seed: Seed | None = None
    """Extension: makes the images repeatable."""
    response_format: Literal["b64_json"] | None = None
    """The server keeps no files, so it has no URLs."""
    output_format: ImageFormat | None = None
    """`png` is the default."""
    output_compression: Annotated[Integer, Field(ge=0, le=100)] | None = None
    """Quality of `jpeg` and `webp`; 100, the default, is the best."""
    quality: Literal["auto", "standard"] | None = None
    style: Literal["vivid"] | None = None
    """OpenAI's default, which changes nothing here."""
    background: Literal["auto", "opaque"] | None = None
    moderation: Literal["auto", "low"] | None = None
    """Nothing is moderated."""
    user: str | None = None
    safety_identifier: str | None = None


class GeneratedImage(BaseModel):
    b64_json: str
    """Base64 of the file."""


class ImagesResponse(BaseModel):
    created: int
    """Unix time."""
    data: list[GeneratedImage]
    background: Literal["opaque"] = "opaque"
    output_format: ImageFormat
    size: str


_EXAMPLES: dict[str, dict[str, object]] = {"image": {"prompt": "A lighthouse at dusk", "seed": 1}}

_HARMLESS_VALUES: dict[str, tuple[object, ...]] = {
    "stream": (None, False),
    "partial_images": (None, 0),
    "image": (None,),
    "mask": (None,),
    "input_fidelity": (None,),
    "negative_prompt": (None, ""),
    "num_inference_steps": (None,),
    "guidance_scale": (None,),
    "true_cfg_scale": (None,),
}
"""Fields of OpenAI and other servers that change the answer, with the values that have no effect."""
_HINTS = {"stream": "Images are not streamed by this server: leave 'stream' out."}


def images_router(state: ServerState, admission: Admission) -> APIRouter:
    router = APIRouter(tags=["images"])

    @router.post(
        "/v1/images/generations",
        summary="Generate images from a prompt",
        responses={200: {"model": ImagesResponse, "description": "The images."}, **GENERATION_ERRORS},
        openapi_extra=request_body(ImageRequest, _EXAMPLES),
    )
    async def create_images(request: Request) -> Response:
        state.require_generator()  # before reading the body
        body = await read_json(request)
        return await until_disconnect(_answer(state, admission, body), request.receive)

    return router


async def _answer(state: ServerState, admission: Admission, given: object) -> Response:
    """Generates all images concurrently; if one fails, the request fails. Raises `OmniError`."""
    generator = state.require_generator()
    body = validate(ImageRequest, given)
    requests, size = _parse(body, generator.model_info)
    admission.enter_choices(len(requests))
    try:
        generations = await submit_all(generator, requests)
    except InvalidRequestError as error:
        if error.param == "messages":
            error.param = "prompt"
        raise
    images: dict[int, npt.NDArray[np.uint8]] = {}
    try:
        async with aclosing(follow_choices(generations, state)) as events:
            async for item in events:
                if item is not None and isinstance(item[1], ImageDone):
                    images[item[0]] = item[1].pixels
    finally:
        await close_all(generations)
    in_order = [images[index] for index in range(len(requests))]
    return Response(await asyncio.to_thread(_render, body, size, in_order), media_type="application/json")


def _parse(body: ImageRequest, model: ModelInfo) -> tuple[list[OmniRequest], ImageSize]:
    """Checks rules across fields and of the model. Returns a request per image.

    Raises `InvalidRequestError` or `ModelNotFoundError`.
    """
    check_model(model.name if body.model is None else body.model, model)
    check_extra_fields(body.model_extra, _HARMLESS_VALUES, _HINTS)
    if not model.image_sizes:
        raise unsupported(f"The model '{model.name}' does not generate images.", "model")
    if not body.prompt.strip():
        raise InvalidRequestError(
            "Invalid 'prompt': it says nothing about the image.", param="prompt", code="empty_string"
        )
    size = _size(body.size, model.image_sizes)
    if body.output_compression not in (None, 100) and body.output_format in (None, "png"):
        raise InvalidRequestError(
            "'output_compression' is allowed only where 'output_format' is 'jpeg' or 'webp'.",
            param="output_compression",
        )
    name = f"img-{uuid.uuid4().hex}"
    began_at = time.monotonic()
    requests = [
        OmniRequest(
            request_id=f"{name}-{index}",
            messages=(ChatMessage("user", (TextPart(body.prompt),)),),
            image=ImageOutput(size, None if body.seed is None else (body.seed + index) % 2**63),
            began_at=began_at,
            is_another_choice=index > 0,
        )
        for index in range(body.n or 1)
    ]
    return requests, size


def _size(name: str | None, offered: Sequence[ImageSize]) -> ImageSize:
    if name is None or name == "auto":
        return offered[0]
    for size in offered:
        if name == str(size):
            return size
    raise unsupported_choice("size", name, ("auto", *map(str, offered)))


def _render(body: ImageRequest, size: ImageSize, images: Sequence[npt.NDArray[np.uint8]]) -> bytes:
    """The response body. Takes a fraction of a second for large images."""
    file_format = body.output_format or "png"
    quality = 100 if body.output_compression is None else body.output_compression
    files = []
    for pixels in images:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, file_format, quality=quality)
        files.append(GeneratedImage(b64_json=base64.b64encode(file.getvalue()).decode()))
    response = ImagesResponse(created=int(time.time()), data=files, output_format=file_format, size=str(size))
    return response.model_dump_json().encode()
