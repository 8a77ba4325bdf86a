"""Converts the fields of a request for images to `OmniRequest`s.

What the model can do is checked by the generator (`omni_server.generation.Generator.submit`), whose names of
parameters `submit_images` replaces by those of the API.
"""

import re
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace

from omni_server.api.answer_stream import AnswerStream
from omni_server.api.config import ApiConfig
from omni_server.api.image_options import MAX_PROMPT_CHARACTERS, ImageOptions, LoraChoice
from omni_server.api.images.schemas import ImageFields
from omni_server.api.images.sizes import automatic_size
from omni_server.api.parse import check_extra_fields, check_model
from omni_server.api.validation import missing_parameter, unsupported
from omni_server.errors import InvalidRequestError
from omni_server.types import ChatMessage, ImagePart, ModelInfo, OmniRequest, TextPart
from omni_server.types.images import ImageOutput, ImageSize, Lora

PARAMETERS: Mapping[str, str] = {
    "num_steps": "num_inference_steps",
    "num_partial_images": "partial_images",
    "loras": "lora",
}
"""Fields of `ImageOutput` that have another name in requests."""

_SIZE = re.compile(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})")
_INSTEAD = {
    "aspect_ratio": "size",
    "cfg_scale": "guidance_scale",
    "image_config": "size",
    "num_outputs_per_prompt": "n",
    "steps": "num_inference_steps",
}
OTHER_SERVERS_FIELDS: Mapping[str, Sequence[object]] = {
    **dict.fromkeys((*_INSTEAD, "strength"), (None,)),
    "extra_body": (None, {}),
    "image_config": (None, {}),
    "num_outputs_per_prompt": (None, 1, "1"),
}
"""Fields of other servers that change the image, with the values that have no effect."""
OTHER_SERVERS_HINTS: Mapping[str, str] = {
    **{theirs: f"'{theirs}' is not supported; use '{ours}' instead." for theirs, ours in _INSTEAD.items()},
    "extra_body": "'extra_body' is an argument of OpenAI's client: put its fields beside 'model'.",
}
_OPENAI_FIELDS = (
    "image", "mask", "markup", "input_fidelity", "style", "complexity", "frame_count", "frame_duration_ms",
    "svg", "svg[model]",
)  # fmt: skip
_HARMLESS_VALUES: Mapping[str, Sequence[object]] = {
    **OTHER_SERVERS_FIELDS,
    **dict.fromkeys(_OPENAI_FIELDS, (None,)),
    "images": (None, []),
}
_HINTS: Mapping[str, str] = {
    **OTHER_SERVERS_HINTS,
    "image": "'image' is not supported here: send images to edit to /v1/images/edits.",
    "mask": "'mask' is not supported: describe in the prompt what to change.",
}


def image_output(fields: ImageFields, model: ModelInfo, config: ApiConfig) -> ImageOutput:
    """Checks rules across fields and the server's limits. The size is None for `auto`.

    Raises `InvalidRequestError` or `ModelNotFoundError`.
    """
    check_model(fields.model, model)
    if not model.image_sizes:
        raise unsupported(f"The model '{model.name}' does not generate images.", "model")
    check_extra_fields(fields.model_extra, _HARMLESS_VALUES, _HINTS)
    check_prompt(fields.prompt, "prompt")
    if fields.include_parameters and fields.output_format not in (None, "png"):
        raise InvalidRequestError(
            "'include_parameters' is allowed only where 'output_format' is 'png'.", param="include_parameters"
        )
    if fields.partial_images and not fields.stream:
        raise InvalidRequestError(
            "'partial_images' is allowed only where 'stream' is true.", param="partial_images"
        )
    if fields.stream and (fields.n or 1) > 1:
        raise unsupported("Only n=1 is supported with 'stream'.", "n")
    output = replace(checked_options(fields, config), num_partial_images=fields.partial_images or 0)
    if output.seed is None and fields.include_parameters:
        return replace(output, seed=secrets.randbits(63))  # the file names it
    return output


def check_prompt(prompt: str, param: str) -> None:
    """Raises `InvalidRequestError` if the prompt is too long or says nothing."""
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        raise InvalidRequestError(
            f"Invalid '{param}': the prompt of an image has at most {MAX_PROMPT_CHARACTERS} characters.",
            param=param,
            code="string_above_max_length",
        )
    if not prompt.strip():
        raise InvalidRequestError(
            f"Invalid '{param}': it says nothing about the image.", param=param, code="empty_string"
        )


def checked_options(options: ImageOptions, config: ApiConfig) -> ImageOutput:
    """Checks rules across fields and the server's limits. The size is None for `auto`. Raises
    `InvalidRequestError`."""
    if options.output_compression not in (None, 100) and options.output_format in (None, "png"):
        raise InvalidRequestError(
            "'output_compression' is allowed only where 'output_format' is 'jpeg' or 'webp'.",
            param="output_compression",
        )
    if (options.true_cfg_scale or 0) > 1 and options.negative_prompt is None:
        raise InvalidRequestError(
            "'true_cfg_scale' above 1 has an effect only where 'negative_prompt' is given.",
            param="true_cfg_scale",
        )
    steps = options.num_inference_steps
    if steps is not None and steps > config.max_image_steps:
        raise InvalidRequestError(
            f"Invalid 'num_inference_steps': expected a value <= {config.max_image_steps}.",
            param="num_inference_steps",
            code="integer_above_max_value",
        )
    return ImageOutput(
        size=_size(options, config.max_output_pixels),
        # -1 is random, as front ends of Stable Diffusion send it.
        seed=None if options.seed in (None, -1) else options.seed % 2**63,
        negative_prompt=options.negative_prompt,
        num_steps=steps,
        guidance_scale=options.guidance_scale,
        true_cfg_scale=options.true_cfg_scale,
        loras=_loras(options.lora),
    )


def _loras(given: str | list[LoraChoice] | None) -> tuple[Lora, ...]:
    if isinstance(given, str):
        return (Lora(given),)
    return tuple(Lora(choice.name, choice.scale) for choice in given or ())


def _size(options: ImageOptions, max_pixels: int) -> ImageSize | None:
    name = None if options.size == "auto" else options.size
    if (options.width is None) != (options.height is None):
        raise missing_parameter("width" if options.width is None else "height")
    if options.width is not None:
        sides = f"{options.width}x{options.height}"
        if name not in (None, sides):
            raise InvalidRequestError(
                f"Invalid 'size': it contradicts 'width' and 'height', which are {sides}.", param="size"
            )
        name = sides
    if name is None:
        return None
    match = _SIZE.fullmatch(name)
    if match is None:
        raise InvalidRequestError(
            f"Invalid value: '{name[:64]}'. Expected 'auto' or WIDTHxHEIGHT, as in '1024x1024'.", param="size"
        )
    size = ImageSize(int(match[1]), int(match[2]))
    if size.num_pixels > max_pixels:
        raise InvalidRequestError(
            f"Invalid 'size': {size} has more than the {max_pixels} pixels that this server allows.",
            param="size",
        )
    return size


def image_outputs(
    output: ImageOutput, number: int, model: ModelInfo, images: Sequence[ImagePart], config: ApiConfig
) -> list[ImageOutput]:
    """What `number` images ask for: the second has the next seed, and so on. `images` are to be edited."""
    if output.size is None:
        output = replace(output, size=automatic_size(model, images, config.max_output_pixels))
    if output.seed is None:
        return [output] * number
    return [replace(output, seed=(output.seed + index) % 2**63) for index in range(number)]


def image_requests(
    prompt: str, outputs: Sequence[ImageOutput], images: Sequence[ImagePart]
) -> list[OmniRequest]:
    name = f"img-{uuid.uuid4().hex}"
    began_at = time.monotonic()
    message = ChatMessage("user", (*images, TextPart(prompt)))
    return [
        OmniRequest(
            request_id=f"{name}-{index}",
            messages=(message,),
            image=output,
            began_at=began_at,
            is_sibling_choice=index > 0,
        )
        for index, output in enumerate(outputs)
    ]


async def submit_images(
    stream: AnswerStream, requests: Sequence[OmniRequest], names: Mapping[str, str]
) -> None:
    """Errors name the fields of the API: `names` are those of the prompt and its images."""
    try:
        for request in requests:
            await stream.submit(request)
    except InvalidRequestError as error:
        if error.param is not None:
            error.param = {**PARAMETERS, **names}.get(error.param, error.param)
        if error.code == "unsupported_parameter":
            error.message = f"The model does not have the parameter '{error.param}'."
        raise
