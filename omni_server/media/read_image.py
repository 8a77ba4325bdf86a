"""Loaded by `limited_program`: decodes an image with Pillow and libheif.

The arguments are `max_image_pixels` and `max_aspect_ratio` of `MediaLimits`, and `header` or `pixels`. The
output is the height and width (`HEADER`), and with `pixels` the image, RGB, uint8. The exit status is 0 or
one of those below.

Pillow reads a whole file for its header, and what it reads may be anything: the first limits of memory and
CPU time are those of the header, and the size that it declares adds to them."""

import os
import resource
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import pi_heif
from PIL import AvifImagePlugin, Image, ImageOps, UnidentifiedImageError

HEADER = struct.Struct("=II")
DAMAGED, UNKNOWN_FORMAT, TOO_LARGE, EXTREME_RATIO, TOO_MUCH_TEXT = range(3, 8)
"""The first is also `limited_program`'s, if memory runs out."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "AVIF", "HEIF")

HEADER_BYTES, FILE_COPIES, BYTES_PER_PIXEL = 64 << 20, 2, 24
"""Memory. AVIF and HEIF are read at once; HEIF of 10 bits with transparency took 21 bytes per pixel."""
HEADER_S, S_PER_MEGABYTE, S_PER_MEGAPIXEL = 2.0, 0.1, 0.1
"""CPU time. A CMYK JPEG of 49 megapixels and 68 MB took 5.0 s, a PNG with transparency of 135 MB 4.0 s."""

_STRIP_BYTES = 1 << 20
_BASE_BYTES = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
"""Address space before the first file."""

Image.init()  # Pillow would load further formats for a file in none of these, when nothing can be opened any more
pi_heif.register_heif_opener(thumbnails=False, decode_threads=1)
AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # each would take address space for its stack


def read(file: BinaryIO, output: BinaryIO, arguments: Sequence[str]) -> int:
    max_pixels, max_aspect_ratio, what = int(arguments[0]), float(arguments[1]), arguments[2]
    num_bytes = os.fstat(file.fileno()).st_size
    _allow(num_bytes, 0)
    # Pillow's readers raise many kinds of errors on damaged files (OSError, SyntaxError, struct.error,
    # zlib.error, IndexError, ...), which all mean that this is not an image.
    try:
        with Image.open(file, formats=FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                return TOO_LARGE
            if max(width, height) > max_aspect_ratio * min(width, height):
                return EXTREME_RATIO
            if what == "header":
                output.write(HEADER.pack(height, width))
                return 0
            _allow(num_bytes, width * height)
            ImageOps.exif_transpose(image, in_place=True)
            _write(_to_rgb(image), output)
    except Image.DecompressionBombError:
        return TOO_LARGE
    except UnidentifiedImageError:
        return UNKNOWN_FORMAT
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - see above
        # Pillow unpacks at most 1 MiB of each non-pixel chunk of a PNG; only these words identify that error.
        is_text = isinstance(error, ValueError) and str(error).startswith(
            ("Decompressed data too large", "Too much memory used")
        )
        return TOO_MUCH_TEXT if is_text else DAMAGED
    return 0


def _allow(num_bytes: int, num_pixels: int) -> None:
    """Sets the limits for a file of this size."""
    seconds = HEADER_S + S_PER_MEGABYTE * num_bytes / 1e6 + S_PER_MEGAPIXEL * num_pixels / 1e6
    memory = _BASE_BYTES + HEADER_BYTES + FILE_COPIES * num_bytes + BYTES_PER_PIXEL * num_pixels
    for kind, most in ((resource.RLIMIT_CPU, round(seconds)), (resource.RLIMIT_AS, memory)):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (min(most, hard), hard))


def _to_rgb(image: Image.Image) -> Image.Image:
    """Puts transparency over white."""
    if image.mode.startswith("I"):
        # 16-bit grey; Pillow's own conversion would clip at 255 instead of scaling.
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.new("RGB", layer.size, "white")
        image.paste(layer, mask=layer)
    return image if image.mode == "RGB" else image.convert("RGB")


def _write(image: Image.Image, output: BinaryIO) -> None:
    """In strips: as a whole it would take three more bytes per pixel."""
    output.write(HEADER.pack(image.height, image.width))
    num_rows = max(_STRIP_BYTES // (3 * image.width), 1)
    for top in range(0, image.height, num_rows):
        output.write(image.crop((0, top, image.width, min(top + num_rows, image.height))).tobytes())
