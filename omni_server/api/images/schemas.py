"""The requests of the image endpoints, their responses and the events of their streams."""

from typing import Annotated, Literal

from openai.types.images_response import Usage
from pydantic import BaseModel, ConfigDict, Field

from omni_server.api.image_options import MAX_PROMPT_CHARACTERS, ImageFormat, ImageOptions
from omni_server.api.validation import Integer

MAX_IMAGES = 10
"""Per request; OpenAI's limit."""
MAX_PARTIAL_IMAGES = 3
"""OpenAI's limit."""


class ImageFields(ImageOptions):
    """Fields of both endpoints. Those that are not listed are accepted and ignored, as clients send many,
    except for those that would change the image (`omni_server.api.images.parse`)."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    model: str | None = None
    """The served model is the default."""
    prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS, json_schema_extra={"pattern": r"\S"})]
    """What the image shows, or what to change; not only white space."""
    n: Annotated[Integer, Field(ge=1, le=MAX_IMAGES)] | None = None
    """How many images; 1 is the default. With a seed, the second image has the next seed, and so on."""
    response_format: Literal["b64_json"] | None = None
    """The server keeps no files, so it has no URLs."""
    stream: bool | None = None
    """Server-sent events, for one image."""
    partial_images: Annotated[Integer, Field(ge=0, le=MAX_PARTIAL_IMAGES)] | None = None
    """Previews in the stream, at most."""
    quality: Literal["auto", "low", "medium", "high", "standard", "hd"] | None = None
    """Has no effect: the model has one quality."""
    background: Literal["auto", "opaque"] | None = None
    moderation: Literal["auto", "low"] | None = None
    """Nothing is moderated."""
    user: str | None = None
    safety_identifier: str | None = None

    include_parameters: bool | None = None
    """Extension: write the request and its seed into the text chunk `parameters` of each PNG, as JSON."""


class ImageRequest(ImageFields):
    model_config = ConfigDict(strict=True)

    style: Literal["vivid"] | None = None
    """OpenAI's default, which changes nothing here."""


class ImageEditForm(ImageFields):
    """The fields of the form except `image`. They come as strings, so "true" is a boolean and "0.2" is a
    number."""

    input_fidelity: Literal["low"] | None = None
    """OpenAI's default. How faithful an edit is depends on the model alone."""


class ImageUsage(Usage):
    """In image tokens: squares of 16 x 16 pixels."""


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
