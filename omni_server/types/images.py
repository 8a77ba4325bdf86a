"""Sizes, requests and results of generated images. No I/O, no torch, no vLLM."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class ImageSize:
    """In pixels."""

    width: int
    height: int

    @property
    def num_pixels(self) -> int:
        return self.width * self.height

    def __str__(self) -> str:
        """As OpenAI writes it, `1024x1536`."""
        return f"{self.width}x{self.height}"


@dataclass(frozen=True)
class Lora:
    """An adapter that the model has by name."""

    name: str
    scale: float = 1.0
    """How much of it is applied."""


@dataclass(frozen=True)
class ImageOutput:
    """Present in a request for an image. The images to edit are `omni_server.types.ImagePart`s of the
    request's messages.

    None leaves a parameter to the model. All fields but the first two are allowed only for models that name
    them in `ImageFeatures.parameters`.
    """

    size: ImageSize | None = None
    """One of `ModelInfo.image_sizes`, or one that `ImageFeatures.free_sizes` allows. None selects the first
    size, or, with an image to edit, one of the same shape."""
    seed: int | None = None
    """Seed of the noise, 0 to 2**63 - 1; None draws one."""
    negative_prompt: str | None = None
    """What the image must not show."""
    num_steps: int | None = None
    """Denoising steps; at least 1."""
    guidance_scale: float | None = None
    """How closely the image follows the prompt: of classifier-free guidance, or an input of models that were
    distilled from it."""
    true_cfg_scale: float | None = None
    """Classifier-free guidance of models whose `guidance_scale` is distilled; needs a negative prompt."""
    num_partial_images: int = 0
    """Previews (`PartialImage`) at equal distances, at most."""
    loras: tuple[Lora, ...] = ()
    """Of `ImageFeatures.loras`, each at most once; they are applied together."""


@dataclass(frozen=True)
class FreeSizes:
    """The sizes that a model can generate, other than those that it lists."""

    multiple: int
    """Width and height are multiples of this many pixels."""
    max_ratio: float
    """Of the longer to the shorter side."""
    max_pixels: int
    """Width x height."""

    def allows(self, size: ImageSize) -> bool:
        sides = size.width, size.height
        return (
            min(sides) > 0
            and all(side % self.multiple == 0 for side in sides)
            and max(sides) <= self.max_ratio * min(sides)
            and size.num_pixels <= self.max_pixels
        )

    def closest(self, shape: ImageSize, num_pixels: int) -> ImageSize:
        """Returns an allowed size of about `num_pixels`, at most, with the proportions of `shape`; the
        smallest size if that has more."""
        ratio = min(max(shape.width / shape.height, 1 / self.max_ratio), self.max_ratio)
        area = max(self.multiple**2, min(num_pixels, self.max_pixels))
        width, height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        size = ImageSize(self._rounded(width), self._rounded(height))
        # Rounding may exceed the ratio, and the area if it raises a side to `multiple`.
        while not self.allows(size) or size.num_pixels > area:
            wide = size.width > size.height
            size = ImageSize(size.width - self.multiple * wide, size.height - self.multiple * (not wide))
        return size

    def _rounded(self, side: float) -> int:
        return max(1, int(side) // self.multiple) * self.multiple


@dataclass(frozen=True)
class ImageFeatures:
    """What a model that generates images can do, besides prompts and seeds."""

    parameters: frozenset[str] = frozenset()
    """Fields of `ImageOutput` that requests may set."""
    free_sizes: FreeSizes | None = None
    """None: only the listed sizes."""
    max_input_images: int = 0
    """Images that a request may contain for editing."""
    needs_input_image: bool = False
    loras: tuple[str, ...] = ()
    """Names of the adapters that requests may choose."""


@dataclass(frozen=True)
class ImageProgress:
    """A denoising step of the image is done. Sent only by models that work in steps."""

    step: int
    """Steps done."""
    num_steps: int
    """0 if the model does not say."""


@dataclass(frozen=True)
class PartialImage:
    """A preview, of the size of the image. A request may get fewer than it asked for."""

    index: int
    """From 0."""
    pixels: npt.NDArray[np.uint8]  # [height, width, 3], RGB


@dataclass(frozen=True)
class ImageDone:
    pixels: npt.NDArray[np.uint8]  # [height, width, 3], RGB
