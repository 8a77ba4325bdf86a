"""Image files, as base64. Writing a large one takes a fraction of a second: call it in a thread."""

import base64
import io
import json
from dataclasses import asdict

import numpy as np
import numpy.typing as npt
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from omni_server.api.image_options import ImageFormat, ImageOptions
from omni_server.api.images.schemas import ImageFields
from omni_server.types.images import ImageOutput, ImageSize

TEXT_CHUNK = "parameters"
"""Keyword of a PNG's text chunk with the request, as JSON."""

Pixels = npt.NDArray[np.uint8]  # [height, width, 3], RGB


class ImageWriter:
    """Writes the files of one request."""

    def __init__(self, fields: ImageFields, model_name: str) -> None:
        self._fields = fields
        self._model_name = model_name
        self.format: ImageFormat = fields.output_format or "png"

    def base64(self, pixels: Pixels, output: ImageOutput) -> str:
        """`output` is what the image was asked for with."""
        info: PngInfo | None = None
        if self._fields.include_parameters:
            info = PngInfo()
            info.add_itxt(TEXT_CHUNK, self._parameters(size_of(pixels), output))
        return _base64(pixels, self._fields, info)

    def _parameters(self, size: ImageSize, output: ImageOutput) -> str:
        """A request that makes this image again, if nothing is to be edited."""
        parameters: dict[str, object] = {
            "model": self._model_name,
            "prompt": self._fields.prompt,
            "size": str(size),
            "seed": output.seed,
            "negative_prompt": output.negative_prompt,
            "num_inference_steps": output.num_steps,
            "guidance_scale": output.guidance_scale,
            "true_cfg_scale": output.true_cfg_scale,
            "lora": [asdict(lora) for lora in output.loras] or None,
        }
        given = {name: value for name, value in parameters.items() if value is not None}
        return json.dumps(given, ensure_ascii=False)


def data_url(pixels: Pixels, options: ImageOptions) -> str:
    """The file as a `data:` URL."""
    return f"data:image/{options.output_format or 'png'};base64,{_base64(pixels, options)}"


def _base64(pixels: Pixels, options: ImageOptions, info: PngInfo | None = None) -> str:
    """`info` is for PNG only."""
    file, image = io.BytesIO(), Image.fromarray(pixels)
    if info is not None:
        image.save(file, "png", pnginfo=info)
    else:
        quality = 100 if options.output_compression is None else options.output_compression
        image.save(file, options.output_format or "png", quality=quality)
    return base64.b64encode(file.getvalue()).decode()


def size_of(pixels: Pixels) -> ImageSize:
    height, width, _ = pixels.shape
    return ImageSize(width, height)
