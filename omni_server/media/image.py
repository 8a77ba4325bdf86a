"""Decodes images to RGB arrays with Pillow and libheif, in a separate process."""

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from omni_server.errors import InvalidRequestError
from omni_server.media.limited_process import Cancellation, Output, Reader, read_in_process
from omni_server.media.limits import MediaLimits
from omni_server.types import ImagePart

_MODULE = Path(__file__).with_name("read_image.py")
_HEADER = struct.Struct("=II")
_DAMAGED, _UNKNOWN_FORMAT, _TOO_LARGE, _EXTREME_RATIO, _TOO_MUCH_TEXT = range(3, 8)
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "AVIF", "HEIF")
"""As in the module: importing it would load Pillow."""

_BASE_MEMORY_BYTES, _MEMORY_BYTES_PER_PIXEL = 512 << 20, 24
"""Address space of the process, which limits itself further by what the file declares."""


def decode_image(data: bytes, limits: MediaLimits, cancellation: Cancellation | None = None) -> ImagePart:
    """Applies the EXIF orientation, puts transparency over white, and uses the first frame of an animation.

    Raises `InvalidRequestError` with code `invalid_image`, and `OmniError` if the decoder cannot be run.
    """
    with _reading(data, limits, cancellation, "pixels") as (output, height, width):
        pixels = np.empty((height, width, 3), dtype=np.uint8)
        output.read_into(pixels.data.cast("B"))
        output.check_nothing_left()
    return ImagePart(pixels)


def count_pixels(data: bytes, limits: MediaLimits, cancellation: Cancellation | None = None) -> int:
    """Height x width of `decode_image`'s result, by the header; raises the same errors for it."""
    with _reading(data, limits, cancellation, "header") as (output, height, width):
        output.check_nothing_left()
    return height * width


@contextmanager
def _reading(
    data: bytes, limits: MediaLimits, cancellation: Cancellation | None, what: str
) -> Iterator[tuple[Output, int, int]]:
    if len(data) > limits.max_bytes:
        raise _invalid(f"is larger than the {limits.max_bytes} bytes allowed")
    reader = Reader(
        module=_MODULE,
        arguments=[str(limits.max_image_pixels), str(limits.max_aspect_ratio), what],
        reads="the image",
        max_memory_bytes=_BASE_MEMORY_BYTES + _MEMORY_BYTES_PER_PIXEL * limits.max_image_pixels,
        max_cpu_s=math.ceil(limits.decode_timeout_s),
        timeout_s=limits.decode_timeout_s,
        refusals={
            _DAMAGED: _invalid("is damaged or incomplete"),
            _UNKNOWN_FORMAT: _invalid(f"is not in a known format ({', '.join(_FORMATS)})"),
            _TOO_LARGE: _invalid(f"has more than the {limits.max_image_pixels} pixels allowed"),
            _EXTREME_RATIO: _invalid(f"has an aspect ratio above {limits.max_aspect_ratio:g}"),
            _TOO_MUCH_TEXT: _invalid("holds text or a colour profile that unpacks to more than 1 MiB"),
        },
        too_slow=_invalid("takes too much time to decode for its size"),
    )
    with read_in_process(reader, data, cancellation or Cancellation()) as output:
        height, width = _HEADER.unpack(output.read(_HEADER.size))
        if not 1 <= height * width <= limits.max_image_pixels:  # trusted only within the limits
            raise output.damaged(f"{width} x {height} pixels")
        yield output, height, width


def _invalid(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"The image {what}.", code="invalid_image")
