"""Decodes images to RGB arrays with Pillow."""

import io

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from omni_server.errors import InvalidRequestError
from omni_server.media.limits import MediaLimits
from omni_server.types import ImagePart

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def decode_image(data: bytes, limits: MediaLimits) -> ImagePart:
    """Applies the EXIF orientation, puts transparency over white, and uses the first frame of an animation.

    Accepts PNG, JPEG, WebP, GIF and BMP. Raises `InvalidRequestError` with code `invalid_image`.
    """
    with _opened(data, limits) as image:
        try:
            pixels = _to_rgb(ImageOps.exif_transpose(image))
        except Exception as error:
            raise _invalid(_fault(error)) from error
    return ImagePart(pixels)


def count_pixels(data: bytes, limits: MediaLimits) -> int:
    """Width x height of `decode_image`'s result, by the header; raises the same errors for it."""
    with _opened(data, limits) as image:
        return image.width * image.height


def _opened(data: bytes, limits: MediaLimits) -> Image.Image:
    """Reads the header only."""
    if len(data) > limits.max_bytes:
        raise _invalid(f"is larger than the {limits.max_bytes} bytes allowed")
    # Pillow's readers raise many kinds of errors on damaged files (OSError, SyntaxError, struct.error,
    # zlib.error, IndexError, ...), which all mean that this is not an image.
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _invalid(f"has more than the {limits.max_image_pixels} pixels allowed") from error
    except UnidentifiedImageError as error:
        raise _invalid(f"is not in a known format ({', '.join(_FORMATS)})") from error
    except Exception as error:
        raise _invalid(_fault(error)) from error
    width, height = image.size
    if width * height > limits.max_image_pixels:
        raise _invalid(f"has {width}x{height} pixels, more than the {limits.max_image_pixels} allowed")
    if max(width, height) > limits.max_aspect_ratio * min(width, height):
        raise _invalid(f"has an aspect ratio above {limits.max_aspect_ratio:g}")
    return image


def _fault(error: Exception) -> str:
    # Pillow unpacks at most 1 MiB of each non-pixel chunk of a PNG; only these words identify that error.
    if isinstance(error, ValueError) and str(error).startswith(
        ("Decompressed data too large", "Too much memory used")
    ):
        return "holds text or a colour profile that unpacks to more than 1 MiB"
    return "is damaged or incomplete"


def _to_rgb(image: Image.Image) -> npt.NDArray[np.uint8]:
    """Returns pixels [height, width, 3] of an image in any mode."""
    if image.mode.startswith("I"):
        # 16-bit grey; Pillow's own conversion would clip at 255 instead of scaling.
        grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.new("RGBA", layer.size, "white")
        image.alpha_composite(layer)
    return np.array(image.convert("RGB"))


def _invalid(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"The image {what}.", code="invalid_image")
