"""The sizes of images within the server's own limit."""

from collections.abc import Sequence

from omni_server.api.config import ApiConfig
from omni_server.api.images.schemas import MAX_PARTIAL_IMAGES
from omni_server.errors import ConfigError
from omni_server.types import ImagePart, ModelInfo
from omni_server.types.images import ImageSize

_BYTES_PER_PIXEL = 3


def check_size_limits(model: ModelInfo, config: ApiConfig) -> None:
    """Raises `ConfigError` if `max_output_pixels` allows no image of the model, or images whose streams do
    not fit `max_unsent_bytes`."""
    if not model.image_sizes:
        return
    areas = [size.num_pixels for size in model.image_sizes]
    free = model.image_features.free_sizes
    smallest = min(areas) if free is None else free.multiple**2
    if config.max_output_pixels < smallest:
        raise ConfigError(
            f"--max-output-pixels is {config.max_output_pixels}, and the smallest image of the model has "
            f"{smallest} pixels"
        )
    largest = min(config.max_output_pixels, max(areas) if free is None else max(*areas, free.max_pixels))
    stream = (MAX_PARTIAL_IMAGES + 1) * _BYTES_PER_PIXEL * largest
    if stream > config.max_unsent_bytes:
        raise ConfigError(
            f"--max-unsent-size is {config.max_unsent_bytes} bytes, and a stream of {MAX_PARTIAL_IMAGES + 1} "
            f"images of {largest} pixels has {stream}: raise it, or lower --max-output-pixels"
        )


def offered_sizes(model: ModelInfo, max_pixels: int) -> list[ImageSize]:
    """Those of the model that have at most `max_pixels`; the one of `auto` first."""
    default, free = model.image_sizes[0], model.image_features.free_sizes
    fitting = [size for size in model.image_sizes if size.num_pixels <= max_pixels]
    if free is None or default in fitting:
        return fitting
    return list(dict.fromkeys((free.closest(default, max_pixels), *fitting)))


def automatic_size(model: ModelInfo, images: Sequence[ImagePart], max_pixels: int) -> ImageSize | None:
    """The size of an image for which the request gives none; None if the generator may choose. `max_pixels`
    is that of a config that passes `check_size_limits`."""
    first, free = offered_sizes(model, max_pixels)[0], model.image_features.free_sizes
    if first == model.image_sizes[0]:
        return None
    if free is None or not images:
        return first
    height, width, _ = images[0].pixels.shape
    return free.closest(ImageSize(width, height), max_pixels)
