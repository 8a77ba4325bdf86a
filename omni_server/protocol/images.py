"""What crosses the process boundary for an image that a stage generates in many steps."""

import msgspec
import numpy as np
import numpy.typing as npt

from omni_server.types.images import Lora

PIXELS_PER_TOKEN = 16 * 16
"""Image tokens are the unit of such a stage's limits: one is a square of 16 x 16 pixels of the image, which
is one token of the denoiser in most models."""


def num_image_tokens(width: int, height: int) -> int:
    """Rounds up."""
    return -(-width * height // PIXELS_PER_TOKEN)


class Pixels(msgspec.Struct, frozen=True):
    """An RGB image."""

    width: int
    height: int
    data: bytes
    """uint8 `[height, width, 3]`, in C order."""

    @classmethod
    def of(cls, pixels: npt.NDArray[np.uint8]) -> "Pixels":
        """`pixels`: `[height, width, 3]`."""
        height, width, _ = pixels.shape
        return cls(width, height, np.ascontiguousarray(pixels).tobytes())

    def array(self) -> npt.NDArray[np.uint8]:
        """Returns uint8 `[height, width, 3]`, read-only. Raises `ValueError` if the sizes do not match."""
        return np.frombuffer(self.data, np.uint8).reshape(self.height, self.width, 3)


class ImageJob(msgspec.Struct, frozen=True):
    """One image to generate. None leaves a parameter to the model."""

    prompt: str
    width: int
    height: int
    seed: int
    """Of the noise, 0 to 2**63 - 1."""
    negative_prompt: str | None = None
    num_steps: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    images: tuple[Pixels, ...] = ()
    """What to edit or to combine."""
    num_partial_images: int = 0
    """Previews to send at equal distances, at most; some schedulers have none."""
    loras: tuple[Lora, ...] = ()
    """Adapters of the stage, applied together."""


class StepProgress(msgspec.Struct, frozen=True, tag="progress"):
    """A denoising step is done."""

    step: int
    """Steps done."""
    num_steps: int
    """0 if the model does not say."""


class Preview(msgspec.Struct, frozen=True, tag="preview"):
    """What the image would be by the estimate of the last step."""

    index: int
    """From 0."""
    pixels: Pixels


StageEvent = StepProgress | Preview
"""What a stage sends before a request's result."""


def encode_job(job: ImageJob) -> bytes:
    """Returns MessagePack bytes."""
    return msgspec.msgpack.encode(job)


def decode_job(data: bytes) -> ImageJob:
    """Raises `ValueError` for anything else."""
    return msgspec.msgpack.decode(data, type=ImageJob)


def encode_event(event: StageEvent) -> bytes:
    """Returns MessagePack bytes."""
    return msgspec.msgpack.encode(event)


def decode_event(data: bytes) -> StageEvent:
    """Raises `ValueError` for anything else."""
    return msgspec.msgpack.decode(data, type=StageEvent)
