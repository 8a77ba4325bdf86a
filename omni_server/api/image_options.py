"""What requests say about an image: fields of the image endpoints and of chats."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from omni_server.api.validation import Integer, Seed

MAX_PROMPT_CHARACTERS = 32_000
"""OpenAI's limit."""
MAX_GUIDANCE = 20

ImageFormat = Literal["png", "jpeg", "webp"]
Guidance = Annotated[float, Field(ge=0, le=MAX_GUIDANCE)]


class ImageOptions(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    size: Annotated[str, Field(examples=["auto", "1024x1024"])] | None = None
    """Width and height in pixels; `auto`, the default, is the model's. An edit then has the shape of the
    first image."""
    output_format: ImageFormat | None = None
    """`png` is the default."""
    output_compression: Annotated[Integer, Field(ge=0, le=100)] | None = None
    """Quality of `jpeg` and `webp`; 100, the default, is the best."""
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
