"""What requests say about an image: fields of the image endpoints and of chats."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticKnownError, from_json

from omni_server.api.validation import ExactModel, Integer, Seed

MAX_PROMPT_CHARACTERS = 32_000
"""OpenAI's limit."""
MAX_GUIDANCE = 20
MAX_LORAS = 8
MAX_LORA_SCALE = 10

ImageFormat = Literal["png", "jpeg", "webp"]
Side = Annotated[Integer, Field(ge=1, lt=10**9)]
Guidance = Annotated[float, Field(ge=0, le=MAX_GUIDANCE)]


class LoraChoice(ExactModel):
    name: str
    """One that `/v1/models` lists."""
    scale: Annotated[float, Field(ge=-MAX_LORA_SCALE, le=MAX_LORA_SCALE)] = 1.0
    """How much of it is applied."""


def _read_json(value: object) -> object:
    """Forms have strings only. One choice is as good as a list of it."""
    if isinstance(value, str) and value.startswith(("[", "{")):
        try:
            value = from_json(value, allow_inf_nan=False)
        except ValueError as error:
            raise PydanticKnownError("json_invalid", {"error": str(error)}) from None
    return [value] if isinstance(value, dict) else value


def _lora_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "string"
    return "choices" if isinstance(value, list) else None


LoraField = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[list[LoraChoice], Field(max_length=MAX_LORAS, fail_fast=True), Tag("choices")],
    Discriminator(_lora_kind),
    BeforeValidator(_read_json),
]


class ImageOptions(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    size: Annotated[str, Field(examples=["auto", "1024x1024"])] | None = None
    """Width and height in pixels; `auto`, the default, is the model's. An edit then has the shape of the
    first image."""
    width: Side | None = None
    """Extension: with `height` in place of `size`."""
    height: Side | None = None
    output_format: ImageFormat | None = None
    """`png` is the default."""
    output_compression: Annotated[Integer, Field(ge=0, le=100)] | None = None
    """Quality of `jpeg` and `webp`; 100, the default, is the best."""
    seed: Seed | None = None
    """Extension: makes the images repeatable, unless it is -1."""
    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)] | None = None
    """Extension: what the image must not show."""
    num_inference_steps: Annotated[Integer, Field(ge=1)] | None = None
    """Extension: denoising steps, up to the server's limit."""
    guidance_scale: Guidance | None = None
    """Extension: how closely the image follows the prompt."""
    true_cfg_scale: Guidance | None = None
    """Extension: classifier-free guidance of models whose `guidance_scale` is distilled; needs a negative
    prompt."""
    lora: LoraField | None = None
    """Extension: an adapter of the model by its name, or several with their scales; JSON in a form."""
