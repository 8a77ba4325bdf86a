"""The requests of the image endpoints, their responses and the events of their streams."""

import json
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from omni_server.api.schemas import Seed
from omni_server.api.validation import Integer

MAX_IMAGES = 10
"""Per request; OpenAI's limit."""
MAX_PROMPT_CHARACTERS = 32_000
"""OpenAI's limit."""
MAX_PARTIAL_IMAGES = 3
"""OpenAI's limit."""
MAX_GUIDANCE = 20
MAX_LORAS = 8
MAX_LORA_SCALE = 10

ImageFormat = Literal["png", "jpeg", "webp"]
Guidance = Annotated[float, Field(ge=0, le=MAX_GUIDANCE)]


class LoraChoice(BaseModel):
    name: str
    """One that `/v1/models` lists."""
    scale: Annotated[float, Field(ge=-MAX_LORA_SCALE, le=MAX_LORA_SCALE)] = 1.0
    """How much of it is applied."""


def _read_json(value: object) -> object:
    """Forms have strings only. One choice is as good as a list of it."""
    if isinstance(value, str) and value.startswith(("[", "{")):
        try:
            value = json.loads(value)
        except ValueError:
            return value
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


class ImageFields(BaseModel):
    """Fields of both endpoints. Those that are not listed are accepted and ignored, as clients send many,
    except for those that would change the image (`omni_server.api.images.parse`)."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    model: str | None = None
    """The served model is the default."""
    prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS, json_schema_extra={"pattern": r"\S"})]
    """What the image shows, or what to change; not only white space."""
    n: Annotated[Integer, Field(ge=1, le=MAX_IMAGES)] | None = None
    """How many images; 1 is the default. With a seed, the second image has the next seed, and so on."""
    size: Annotated[str, Field(examples=["auto", "1024x1024"])] | None = None
    """Width and height in pixels; `auto`, the default, is the model's. An edit then has the shape of the
    first image."""
    response_format: Literal["b64_json"] | None = None
    """The server keeps no files, so it has no URLs."""
    output_format: ImageFormat | None = None
    """`png` is the default."""
    output_compression: Annotated[Integer, Field(ge=0, le=100)] | None = None
    """Quality of `jpeg` and `webp`; 100, the default, is the best."""
    stream: bool | None = None
    """Server-sent events, for one image."""
    partial_images: Annotated[Integer, Field(ge=0, le=MAX_PARTIAL_IMAGES)] | None = None
    """Previews in the stream, at most."""
    quality: Literal["auto", "standard"] | None = None
    background: Literal["auto", "opaque"] | None = None
    moderation: Literal["auto", "low"] | None = None
    """Nothing is moderated."""
    user: str | None = None
    safety_identifier: str | None = None

    seed: Seed | None = None
    """Extension: makes the images repeatable."""
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
    include_parameters: bool | None = None
    """Extension: write the request and its seed into the text chunk `parameters` of each PNG, as JSON."""


class ImageRequest(ImageFields):
    model_config = ConfigDict(strict=True)

    style: Literal["vivid"] | None = None
    """OpenAI's default, which changes nothing here."""


class ImageEditForm(ImageFields):
    """The form's fields beside `image`. They come as strings, so "true" is a boolean and "0.2" a number."""

    input_fidelity: Literal["low"] | None = None
    """OpenAI's default. How faithful an edit is depends on the model alone."""


class InputTokens(BaseModel):
    image_tokens: int
    text_tokens: int
    """0: pipelines do not report the tokens of prompts."""


class OutputTokens(BaseModel):
    image_tokens: int
    text_tokens: int


class ImageUsage(BaseModel):
    """In image tokens: squares of 16 x 16 pixels."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    total_tokens: int
    output_tokens_details: OutputTokens


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
    usage: ImageUsage


class ImageEvent(BaseModel):
    type: str
    b64_json: str
    """Base64 of the file."""
    background: Literal["opaque"] = "opaque"
    created_at: int
    """Unix time."""
    output_format: ImageFormat
    quality: Literal["auto"] = "auto"
    size: str


class PartialImageEvent(ImageEvent):
    type: Literal["image_generation.partial_image", "image_edit.partial_image"]
    partial_image_index: int
    """From 0."""


class CompletedEvent(ImageEvent):
    type: Literal["image_generation.completed", "image_edit.completed"]
    usage: ImageUsage
