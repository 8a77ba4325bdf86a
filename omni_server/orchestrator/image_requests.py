"""Requests for images: checks them against the model, renders them, and generates the image."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from omni_server.config.stages import CommonStage
from omni_server.engine.diffusion_handle import DiffusionHandle
from omni_server.engine.engine_handle import Stage
from omni_server.engine.prompt_rendering import context_length_exceeded
from omni_server.errors import CorruptDataError, InvalidRequestError
from omni_server.family import DiffusionPrompt, FamilyModel
from omni_server.orchestrator.request_run import RequestRun
from omni_server.protocol.images import StageEvent, StepProgress
from omni_server.types import ChatMessage, ImagePart
from omni_server.types.images import (
    ImageDone,
    ImageFeatures,
    ImageOutput,
    ImageProgress,
    ImageSize,
    PartialImage,
)

_PLAIN = ImageOutput()
_PARAMETERS = tuple(field.name for field in fields(ImageOutput) if field.name not in ("size", "seed"))


class ImageRequests:
    """What a deployment's requests for images may contain."""

    def __init__(self, family: FamilyModel, stage: CommonStage) -> None:
        """`stage` gets the prompt."""
        self._family = family
        self._max_model_len = stage.max_model_len
        self.features: ImageFeatures = family.image_features(stage)
        self.sizes = _fitting_sizes(family.image_sizes, self.features)
        """The default first; empty without images."""

    def render(
        self, messages: Sequence[ChatMessage], image: ImageOutput
    ) -> tuple[DiffusionPrompt, ImageSize]:
        """Returns the prompt, and the size of the image. Raises `InvalidRequestError` for what the model or
        its stage cannot do. Large images to edit take a fraction of a second: call it in a thread."""
        for name in _PARAMETERS:
            is_set = getattr(image, name) != getattr(_PLAIN, name)
            if is_set and name not in self.features.parameters:
                raise InvalidRequestError(
                    f"this model has no parameter '{name}'", param=name, code="unsupported_parameter"
                )
        self._check_loras(image)
        given = [part for message in messages for part in message.content if isinstance(part, ImagePart)]
        self._check_number(len(given))
        size = self._size(image, given)
        seed = random.getrandbits(63) if image.seed is None else image.seed
        prompt = self._family.image_prompt(messages, image, size=size, seed=seed)
        if len(prompt.token_ids) > self._max_model_len:
            param = "image" if given else "messages"
            raise context_length_exceeded(self._max_model_len, len(prompt.token_ids), param)
        return prompt, size

    def _check_loras(self, image: ImageOutput) -> None:
        for lora in image.loras:
            if lora.name not in self.features.loras:
                known = ", ".join(self.features.loras)
                raise InvalidRequestError(
                    f"there is no LoRA of the name {lora.name[:64]!r}; this model has {known}", param="loras"
                )
        if len({lora.name for lora in image.loras}) < len(image.loras):
            raise InvalidRequestError("a LoRA is named twice", param="loras")

    def _check_number(self, num_images: int) -> None:
        most = self.features.max_input_images
        if num_images > most:
            raise InvalidRequestError(
                f"too many images: this model takes {most} at most" if most else "this model edits no images",
                param="image",
            )
        if num_images == 0 and self.features.needs_input_image:
            raise InvalidRequestError("this model edits images, and the request has none", param="image")

    def _size(self, image: ImageOutput, given: Sequence[ImagePart]) -> ImageSize:
        free, default = self.features.free_sizes, self.sizes[0]
        if image.size is None:
            if free is None or not given:
                return default
            height, width, _ = given[0].pixels.shape
            return free.closest(ImageSize(width, height), default.num_pixels)
        if image.size in self.sizes or (free is not None and free.allows(image.size)):
            return image.size
        known = ", ".join(map(str, self.sizes))
        more = ""
        if free is not None:
            more = (
                f", and others with at most {free.max_pixels} pixels, sides that are multiples of "
                f"{free.multiple}, and a ratio of at most {free.max_ratio:g}"
            )
        raise InvalidRequestError(f"size {image.size} is not offered; sizes are {known}{more}", param="size")


def _fitting_sizes(sizes: tuple[ImageSize, ...], features: ImageFeatures) -> tuple[ImageSize, ...]:
    """Those that fit the stage. If none does, the largest one that is shaped like the first."""
    free = features.free_sizes
    if free is None or not sizes:
        return sizes
    fitting = tuple(size for size in sizes if size.num_pixels <= free.max_pixels)
    return fitting or (free.closest(sizes[0], free.max_pixels),)


@dataclass(eq=False)
class ImageTask:
    """Turns a prompt into an image."""

    request: RequestRun
    stage: Stage[DiffusionHandle]
    prompt: DiffusionPrompt
    size: ImageSize

    async def run(self) -> None:
        request = self.request
        handle = request.choose(self.stage)
        async with handle.life.needed():
            request.timeline.mark_submitted(handle.stage)
            result = await handle.run(
                request.request_id,
                self.prompt.token_ids,
                self.prompt.payload,
                priority=request.ticket.number,
                on_event=self._take,
            )
        request.timeline.mark_output(handle.stage)
        # In a thread: an image of 2048x2048 takes 50 ms.
        pixels = await asyncio.to_thread(_pixels, handle.name, result, self.size)
        request.emit(ImageDone(pixels))

    def _take(self, event: StageEvent) -> None:
        if isinstance(event, StepProgress):
            self.request.emit(ImageProgress(event.step, event.num_steps))
        else:
            self.request.emit(PartialImage(event.index, event.pixels.array()))


def _pixels(stage: str, result: npt.NDArray[np.float32], size: ImageSize) -> npt.NDArray[np.uint8]:
    """Raises `CorruptDataError` if the result is not an image of that size."""
    if result.shape != (size.height, size.width, 3):
        raise CorruptDataError(
            stage, "shape", f"expected an RGB image of {size} pixels, got {list(result.shape)}"
        )
    if not (result.min() >= 0 and result.max() <= 1):  # NaN fails either comparison
        raise CorruptDataError(stage, "samples", "pixels that are not in [0, 1]")
    return np.rint(255 * result).astype(np.uint8)
