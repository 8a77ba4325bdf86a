"""Text to image: one diffusion stage."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from omni_server.config.pipeline import Pipeline, StageSpec
from omni_server.family import DiffusionPrompt, HfOverrides
from omni_server.types import ChatMessage
from omni_server.types.images import ImageOutput, ImageSize
from tests.toy_families.toy import ToyFamily, ToyModel, text_of, with_architecture

PAINTER = "ToyPainter"
PIXELS_PER_TOKEN = 16
"""Per side."""
SLOW_S = 3.0
"""Time of a "slow" prompt's step."""


class ImageInput(msgspec.Struct, frozen=True):
    """The painter's input for one image."""

    prompt: str
    width: int
    height: int
    seed: int


class ImageModel(ToyModel):
    image_sizes = (ImageSize(32, 32), ImageSize(48, 32))

    def image_prompt(
        self, messages: Sequence[ChatMessage], image: ImageOutput, *, size: ImageSize, seed: int
    ) -> DiffusionPrompt:
        num_tokens = size.width * size.height // PIXELS_PER_TOKEN**2
        payload = msgspec.msgpack.encode(ImageInput(text_of(messages), size.width, size.height, seed))
        return DiffusionPrompt((0,) * num_tokens, payload)


class ImageFamily(ToyFamily):
    pipeline = Pipeline({"painter": StageSpec("diffusion", output="image")})
    architectures = (PAINTER,)
    engine_modules = ("tests.toy_families.models",)

    def open(self, model_dir: Path) -> ImageModel:
        return ImageModel(model_dir)

    def hf_overrides(self, model_stage: str) -> HfOverrides | None:
        return painter_config

    def register(self) -> None:
        from vllm import ModelRegistry

        from tests.toy_families.models import ToyPainter

        ModelRegistry.register_model(PAINTER, ToyPainter)


def painter_config(config: Any) -> Any:
    return with_architecture(config, PAINTER)


FAMILY = ImageFamily()
