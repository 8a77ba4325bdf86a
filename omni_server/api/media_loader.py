"""Fetches the media of a request and decodes them in a bounded number of threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from omni_server.api.config import ApiConfig
from omni_server.api.schemas import (
    AudioUrlContent,
    ImageUrlContent,
    InputAudioContent,
    MediaContent,
    VideoUrlContent,
)
from omni_server.errors import InvalidRequestError, OverloadedError
from omni_server.media.audio import count_samples, decode_audio
from omni_server.media.image import count_pixels, decode_image
from omni_server.media.limited_process import Cancellation
from omni_server.media.limits import MediaLimits
from omni_server.media.source import MediaSource, decode_base64
from omni_server.media.video import decode_video, decode_video_with_audio
from omni_server.types import AudioPart, ImagePart, VideoPart

_MAX_READ = 8
"""Most bodies of http(s) and `file:` URLs being fetched, queued or decoded at the same time. Each may be
as large as `MediaLimits.max_bytes`, regardless of the request's own size."""
_URL_PREFIXES = ("data:", "http://", "https://")

MediaPart = AudioPart | ImagePart | VideoPart
Result = TypeVar("Result")


class MediaLoader:
    """Media of one service, with its own threads."""

    @classmethod
    def from_config(cls, config: ApiConfig) -> "MediaLoader":
        """Loads inline data and the URLs that `config` allows. Raises `ConfigError` if it is
        malformed."""
        limits = config.media_limits
        source = MediaSource(config.allowed_media_domains, limits, config.allowed_local_media_path)
        return cls(source, limits, config)

    def __init__(self, source: MediaSource, limits: MediaLimits, config: ApiConfig) -> None:
        """`limits` override the config's."""
        self._source = source
        self._limits = replace(limits, decode_timeout_s=config.media_decode_timeout_s)
        self._decode_timeout_s = config.media_decode_timeout_s
        self._queue_timeout_s = config.media_queue_timeout_s
        self._slots = asyncio.Semaphore(config.media_threads)
        # Not the event loop's pool: media and other work must not delay each other.
        self._threads = ThreadPoolExecutor(config.media_threads, "media")
        self._reads = asyncio.Semaphore(_MAX_READ)

    async def load(self, content: MediaContent, param: str, *, hears_videos: bool = False) -> MediaPart:
        """Decodes one content part; `param` is its path, such as `messages[0].content[1]`. With
        `hears_videos`, the part of a video has its audio track.

        Raises `InvalidRequestError` naming the invalid field, or `OverloadedError` if no
        thread becomes free in time.
        """
        limits = self._limits
        try:
            match content:
                case InputAudioContent(input_audio=audio) if not audio.data.startswith(_URL_PREFIXES):
                    return await self._in_thread(
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
                    return await self._fetched(source.url, lambda data, _: decode_image(data, limits))
                case VideoUrlContent(video_url=source):
                    decode = decode_video_with_audio if hears_videos else decode_video
                    return await self._fetched(source.url, lambda data, stop: decode(data, limits, stop))
        except InvalidRequestError as error:
            error.param = f"{param}.{content.type}.{'data' if content.type == 'input_audio' else 'url'}"
            raise

    async def count_samples(self, data: bytes) -> int:
        """Upper bound for the waveform of `load_audio_file`; raises the same errors."""
        return await self._in_thread(lambda stop: count_samples(data, self._limits, stop))

    async def load_audio_file(self, data: bytes) -> AudioPart:
        """Decodes an uploaded file. Raises the errors of `load`, without a field name."""
        return await self._in_thread(lambda stop: decode_audio(data, self._limits, None, stop))

    async def count_pixels(self, data: bytes) -> int:
        """Size of the image of `load_image_file`; raises the same errors."""
        return await self._in_thread(lambda _: count_pixels(data, self._limits))

    async def load_image_file(self, data: bytes) -> ImagePart:
        """Decodes an uploaded file. Raises the errors of `load`, without a field name."""
        return await self._in_thread(lambda _: decode_image(data, self._limits))

    async def _fetched(self, url: str, decode: Callable[[bytes, Cancellation], Result]) -> Result:
        is_held = url[:5].lower() == "data:"  # already in memory with the request
        if not is_held:
            await self._acquire(self._reads, "fetching")
        try:
            data = await self._source.read(url)
            return await self._in_thread(lambda cancellation: decode(data, cancellation))
        finally:
            if not is_held:
                self._reads.release()

    async def _acquire(self, slots: asyncio.Semaphore, doing: str) -> None:
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await slots.acquire()
        except TimeoutError:
            raise OverloadedError(f"The server is busy {doing} the media of other requests.") from None

    async def _in_thread(self, decode: Callable[[Cancellation], Result]) -> Result:
        """If the caller gives up, its decoding process, if any, is terminated. A thread that decodes by
        itself cannot be stopped: it keeps its slot until it ends, so that slow media of many requests do
        not accumulate threads."""
        await self._acquire(self._slots, "decoding")
        cancellation = Cancellation()
        decoding = asyncio.get_running_loop().run_in_executor(self._threads, decode, cancellation)
        decoding.add_done_callback(self._release)
        try:
            done, _ = await asyncio.wait({decoding}, timeout=self._decode_timeout_s)
        finally:
            cancellation.cancel()
        if not done:
            raise InvalidRequestError(
                f"The media item could not be decoded within {self._decode_timeout_s:g} s.",
                code="media_too_large",
            )
        return decoding.result()

    def _release(self, decoding: "asyncio.Future[Result]") -> None:
        self._slots.release()
        if not decoding.cancelled():
            decoding.exception()  # retrieved, in case the caller has left
