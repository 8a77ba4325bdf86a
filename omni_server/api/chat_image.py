"""Images in chats: `modalities` with "image" are an extension of OpenAI's API.

The answer has the image as OpenRouter and vLLM-Omni send it: in `images` of the message, as a `data:` URL.
"""

from collections.abc import Sequence
from dataclasses import replace

from omni_server.api.answer_stream import submit_all
from omni_server.api.image_options import ChatImage
from omni_server.api.images.parse import ImageLimits, checked_options, name_parameter
from omni_server.api.images.sizes import automatic_size
from omni_server.api.schemas import ChatCompletionRequest
from omni_server.api.state import ObservedGenerator
from omni_server.api.validation import unsupported
from omni_server.errors import InvalidRequestError
from omni_server.generation import Generation
from omni_server.images import ImageOutput
from omni_server.types import ModelInfo, OmniRequest

IMAGE_PREFIX = "image."


def asks_for_image(body: ChatCompletionRequest) -> bool:
    return body.modalities is not None and "image" in body.modalities


def chat_image(body: ChatCompletionRequest, model: ModelInfo, limits: ImageLimits) -> ImageOutput:
    """Returns the image of a chat that asks for one. Without a seed of its own, it has that of the text.

    Raises `InvalidRequestError`.
    """
    if "image" not in model.outputs:
        raise unsupported("This model answers without images.", "modalities")
    if body.modalities is not None and "audio" in body.modalities:
        raise unsupported("An answer has either speech or an image.", "modalities")
    if body.n is not None and body.n > 1:
        raise unsupported("Only n=1 is supported with an image.", "n")
    if body.tools is not None:
        raise unsupported("'tools' cannot be combined with an image.", "tools")
    options = body.image or ChatImage()
    if options.seed is None:
        options = options.model_copy(update={"seed": body.seed})
    try:
        output = checked_options(options, limits)
    except InvalidRequestError as error:
        error.param = f"{IMAGE_PREFIX}{error.param}"
        raise
    if output.size is None:
        output = replace(output, size=automatic_size(model, (), limits.max_output_pixels))
    return output


async def submit_chat(generator: ObservedGenerator, requests: Sequence[OmniRequest]) -> list[Generation]:
    """Submits all choices or none. Errors name the fields of the API."""
    try:
        return await submit_all(generator, requests)
    except InvalidRequestError as error:
        if requests[0].image is not None:
            name_parameter(error, IMAGE_PREFIX)
        raise
