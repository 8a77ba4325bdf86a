"""Images in chats: `modalities` with "image" are an extension of OpenAI's API.

The answer has the image as OpenRouter sends it: in `images` of the message, as a `data:` URL.
"""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from omni_server.api.config import ApiConfig
from omni_server.api.image_options import ImageOptions
from omni_server.api.images.parse import (
    OTHER_SERVERS_FIELDS,
    OTHER_SERVERS_HINTS,
    check_prompt,
    checked_options,
    image_outputs,
)
from omni_server.api.images.schemas import MAX_IMAGES
from omni_server.api.media_loader import MediaLoader
from omni_server.api.messages import check_media, media_kinds, message_parts
from omni_server.api.parse import check_extra_fields
from omni_server.api.schemas import ChatCompletionRequest, Message
from omni_server.api.validation import unsupported
from omni_server.errors import InvalidRequestError
from omni_server.types import ChatMessage, ContentPart, ImagePart, ModelInfo, OmniRequest, TextPart
from omni_server.types.images import ImageOutput

_HARMLESS_VALUES: Mapping[str, Sequence[object]] = {
    **OTHER_SERVERS_FIELDS,
    "partial_images": (None, 0),
}
_HINTS: Mapping[str, str] = {
    **OTHER_SERVERS_HINTS,
    "partial_images": "Chats have no previews: 'partial_images' is for /v1/images/generations.",
}


def image_output(body: ChatCompletionRequest, model: ModelInfo, config: ApiConfig) -> ImageOutput | None:
    """Returns the image that a chat with a model of images asks for, or None. The size is None for `auto`.

    Raises `InvalidRequestError`.
    """
    if not model.only_generates_images:
        if "image" in (body.modalities or []):
            raise unsupported("This model answers without images.", "modalities")
        return None
    if set(body.modalities or ["image"]) != {"image"}:
        raise unsupported(
            f"The model '{model.name}' answers with an image only: 'modalities' must be ['image'] or absent.",
            "modalities",
        )
    if body.tools is not None:
        raise unsupported("'tools' cannot be combined with an image.", "tools")
    if body.logprobs:
        raise unsupported("'logprobs' are supported only where the answer has text.", "logprobs")
    number = body.n or 1
    if number > 1 and body.stream:
        raise unsupported("Only n=1 is supported with an image and 'stream'.", "n")
    if number > MAX_IMAGES:
        raise InvalidRequestError(
            f"Invalid 'n': expected a value <= {MAX_IMAGES} with an image.",
            param="n",
            code="integer_above_max_value",
        )
    check_extra_fields(body.model_extra, _HARMLESS_VALUES, _HINTS)
    return checked_options(body, config)


async def load_image_prompt(
    body: ChatCompletionRequest, model: ModelInfo, media: MediaLoader, held: AsyncExitStack
) -> tuple[ChatMessage, ...]:
    """Returns the last user message: what to generate, and the images to edit, whose memory `held` releases.

    Raises `InvalidRequestError`, or `OverloadedError` from loading images.
    """
    index, message = _last_user_message(body.messages)
    parts = message_parts(message, f"messages[{index}]")
    check_media(media_kinds(parts), model, "messages")
    check_prompt("\n".join(part.text for part, _ in parts if isinstance(part, TextPart)), "messages")
    content: list[ContentPart] = [
        part if isinstance(part, TextPart) else await media.load(part, param) for part, param in parts
    ]
    images = _images_of(content)
    if model.image_features.needs_input_image and not images:
        raise InvalidRequestError(
            f"The model '{model.name}' only edits images: the last user message must contain one.",
            param="messages",
        )
    try:
        num_pixels = sum(image.pixels.shape[0] * image.pixels.shape[1] for image in images)
        await media.hold_images(num_pixels, body.n or 1, held)
    except InvalidRequestError as error:
        error.param = "messages"
        raise
    return (ChatMessage("user", tuple(content)),)


def _last_user_message(messages: Sequence[Message]) -> tuple[int, Message]:
    for index, message in reversed(list(enumerate(messages))):
        if message.role == "user":
            return index, message
    raise InvalidRequestError("An image needs a message with the role 'user'.", param="messages")


def with_images(
    requests: Sequence[OmniRequest], output: ImageOutput, model: ModelInfo, config: ApiConfig
) -> tuple[OmniRequest, ...]:
    """Adds an image to each choice. The second has the next seed, and so on."""
    edited = _images_of(requests[0].messages[-1].content)
    outputs = image_outputs(output, len(requests), model, edited, config)
    return tuple(replace(one, image=image) for one, image in zip(requests, outputs, strict=True))


def file_options(body: ChatCompletionRequest) -> ImageOptions:
    """How images are encoded. The body, with its megabytes of images, need not be kept for that."""
    return ImageOptions(output_format=body.output_format, output_compression=body.output_compression)


def _images_of(content: Sequence[ContentPart]) -> list[ImagePart]:
    return [part for part in content if isinstance(part, ImagePart)]
