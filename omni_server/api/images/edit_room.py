"""Bounds the pixels of images to edit."""

from collections.abc import Callable

from omni_server.api.config import ApiConfig
from omni_server.api.media_room import MediaRoom
from omni_server.errors import InvalidRequestError

LARGEST_EDITS_IN_MEMORY = 4
"""Or a larger number of smaller ones; "largest" is `--max-image-pixels`."""


class EditRoom:
    """Of a request, and of all requests of the server together."""

    def __init__(self, config: ApiConfig) -> None:
        self._max_pixels = config.media_limits.max_image_pixels
        self._room = MediaRoom(
            "images", LARGEST_EDITS_IN_MEMORY * self._max_pixels, config.media_queue_timeout_s
        )

    async def take(self, num_pixels: int, number: int) -> Callable[[], None]:
        """Reserves room for the images of an edit, `num_pixels` in all, with `number` results, each of which
        needs a copy of them; returns its release callback, to call once.

        Raises `InvalidRequestError` if they are too large, or `OverloadedError` if no room becomes free.
        """
        if number * num_pixels > self._max_pixels:
            copies = f", counted once for each of the {number} images to make," if number > 1 else ""
            raise InvalidRequestError(
                f"The images together{copies} have more than the {self._max_pixels} pixels allowed.",
                code="invalid_image",
            )
        return await self._room.take(number * num_pixels)
