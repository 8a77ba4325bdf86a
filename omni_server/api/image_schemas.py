"""Bodies of `POST /v1/images/generations`."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from omni_server.api.schemas import Seed
from omni_server.api.validation import Integer

MAX_IMAGES = 10
"""Per request, as OpenAI allows."""
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
