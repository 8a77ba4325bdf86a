"""Fetches the media of requests and decodes them, within bounds that hold for all of them together."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TypeVar

from omni_server.api.config import ApiConfig
from omni_server.api.memory_budget import MemoryBudget
from omni_server.api.schemas import (
    AudioUrlContent,
    ImageUrlContent,
    InputAudioContent,
    MediaContent,
    VideoUrlContent,
)
from omni_server.errors import InvalidRequestError, OverloadedError
from omni_server.media.audio import DECODED_RATE_HZ, count_samples, decode_audio
from omni_server.media.image import count_pixels, decode_image
from omni_server.media.limited_process import Cancellation
from omni_server.media.process_places import ProcessPlaces
from omni_server.media.source import MediaSource, decode_base64
from omni_server.media.video import decode_video, decode_video_with_audio
from omni_server.types import SAMPLE_RATE_HZ, AudioPart, ImagePart, VideoPart

LARGEST_IN_MEMORY = 4
"""Recordings, or images to edit, of the largest size that are in memory at the same time; or more smaller
ones. Each stays until its request ends, which may take minutes: the request queue alone would admit a
thousand."""

_MAX_READ = 8
"""Most bodies of http(s) and `file:` URLs being fetched, queued or decoded at the same time. Each may be
as large as `MediaLimits.max_bytes`, regardless of the request's own size."""
_URL_PREFIXES = ("data:", "http://", "https://")
_SAMPLE_BYTES = 4
_PIXEL_BYTES = 3

MediaPart = AudioPart | ImagePart | VideoPart
Result = TypeVar("Result")


class MediaLoader:
    """All media of a server. Belongs to one event loop."""

    def __init__(self, config: ApiConfig, source: MediaSource | None = None) -> None:
        """`source` takes the place of that of `config`. Raises `ConfigError` if that is malformed."""
        limits = replace(config.media_limits, decode_timeout_s=config.media_decode_timeout_s)
        self._limits = limits
        self._recording_limits = replace(
            limits, max_bytes=config.max_upload_bytes, max_audio_seconds=config.max_upload_seconds
        )
        self._source = source or MediaSource(
            config.allowed_media_domains, limits, config.allowed_local_media_path
        )
        self._queue_timeout_s = config.media_queue_timeout_s
        recording_bytes = int(_SAMPLE_BYTES * DECODED_RATE_HZ * config.max_upload_seconds)
        self._memory = MemoryBudget(
            LARGEST_IN_MEMORY * max(recording_bytes, _PIXEL_BYTES * limits.max_image_pixels),
            config.media_queue_timeout_s,
            "The server is busy with the media of other requests.",
        )
        busy = "The server is busy decoding the media of other requests."
        self._processes = ProcessPlaces(config.media_processes, config.media_queue_timeout_s, busy)
        self._reads = asyncio.Semaphore(_MAX_READ)

    async def load(self, content: MediaContent, param: str, *, hears_videos: bool = False) -> MediaPart:
        """Decodes one content part; `param` is its path, such as `messages[0].content[1]`. With
        `hears_videos`, the part of a video has its audio track.

        Raises `InvalidRequestError` naming the invalid field, or `OverloadedError` if it would have to wait
        too long.
        """
        limits = self._limits
        try:
            match content:
                case InputAudioContent(input_audio=audio) if not audio.data.startswith(_URL_PREFIXES):
                    return await self._processes.run(
                        lambda stop: decode_audio(decode_base64(audio.data), limits, audio.format, stop)
                    )
                case InputAudioContent(input_audio=audio):
                    return await self._fetched(
                        audio.data, lambda data, stop: decode_audio(data, limits, audio.format, stop)
                    )
                case AudioUrlContent(audio_url=source):
                    return await self._fetched(
                        source.url, lambda data, stop: decode_audio(data, limits, None, stop)
                    )
                case ImageUrlContent(image_url=source):
                    return await self._fetched(
                        source.url, lambda data, stop: decode_image(data, limits, stop)
                    )
                case VideoUrlContent(video_url=source):
                    decode = decode_video_with_audio if hears_videos else decode_video
                    return await self._fetched(source.url, lambda data, stop: decode(data, limits, stop))
        except InvalidRequestError as error:
            error.param = f"{param}.{content.type}.{'data' if content.type == 'input_audio' else 'url'}"
            raise

    async def load_recording(self, data: bytes, held: AsyncExitStack) -> AudioPart:
        """Decodes an audio file to transcribe. `held` releases its memory. Raises the errors of `load`,
        without a field name."""
        limits = self._recording_limits
        num_samples = await self._processes.run(lambda stop: count_samples(data, limits, stop))
        await self._hold(_SAMPLE_BYTES * num_samples, held)
        return await self._processes.run(lambda stop: decode_audio(data, limits, None, stop))

    async def load_voice(self, recording: bytes | str) -> AudioPart:
        """Decodes a recording of a voice at 24 kHz: a file, or its URL. Raises the errors of `load`, without
        a field name."""

        def decode(data: bytes, stop: Cancellation) -> AudioPart:
            return decode_audio(data, self._limits, None, stop, SAMPLE_RATE_HZ)

        if isinstance(recording, str):
            return await self._fetched(recording, decode)
        return await self._processes.run(partial(decode, recording))

    async def load_images(self, files: Sequence[bytes], number: int, held: AsyncExitStack) -> list[ImagePart]:
        """Decodes image files for `hold_images`. Raises the errors of `load`, without a field name."""
        num_pixels = sum(
            [await self._processes.run(partial(count_pixels, file, self._limits)) for file in files]
        )
        await self.hold_images(num_pixels, number, held)
        return [await self._processes.run(partial(decode_image, file, self._limits)) for file in files]

    async def hold_images(self, num_pixels: int, number: int, held: AsyncExitStack) -> None:
        """Waits for the memory of images to edit, `num_pixels` in all, with `number` results, each of which
        needs a copy of them. `held` releases it.

        Raises `InvalidRequestError` if they are too large, or `OverloadedError`.
        """
        if number * num_pixels > self._limits.max_image_pixels:
            copies = f", counted once for each of the {number} images to make," if number > 1 else ""
            raise InvalidRequestError(
                f"The images together{copies} have more than the {self._limits.max_image_pixels} pixels allowed.",
                code="invalid_image",
            )
        await self._hold(_PIXEL_BYTES * number * num_pixels, held)

    async def _hold(self, num_bytes: int, held: AsyncExitStack) -> None:
        await self._memory.acquire(num_bytes)
        held.callback(self._memory.release, num_bytes)

    async def _acquire_read(self) -> None:
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await self._reads.acquire()
        except TimeoutError:
            raise OverloadedError("The server is busy fetching the media of other requests.") from None

    async def _fetched(self, url: str, decode: Callable[[bytes, Cancellation], Result]) -> Result:
        is_held = url[:5].lower() == "data:"  # already in memory with the request
        if not is_held:
            await self._acquire_read()
        try:
            data = await self._source.read(url)
            return await self._processes.run(lambda cancellation: decode(data, cancellation))
        finally:
            if not is_held:
                self._reads.release()
