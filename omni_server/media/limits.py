"""Limits of media from clients, each checked before memory of that size is allocated."""

from dataclasses import dataclass

from omni_server.errors import InvalidRequestError


@dataclass(frozen=True)
class MediaLimits:
    """Limits of one media item; the number of items per request is `ModelInfo.max_media_per_prompt`."""

    max_bytes: int = 64 * 1024 * 1024
    """Size of one audio, image or video, encoded."""

    min_audio_seconds: float = 0.1
    """Audio encoders produce no token for much less."""
    max_audio_seconds: float = 300.0
    """Duration of one audio. Qwen2.5-Omni ignores audio beyond 300 s (`n_samples` of
    preprocessor_config.json); they are 19 MB decoded."""

    decode_timeout_s: float = 60.0
    """Seconds to decode a video or an audio file; then the decoder is killed."""

    max_image_pixels: int = 50_000_000
    """Width times height of an image, as its header declares it; the default is 150 MB decoded."""
    max_aspect_ratio: float = 200.0
    """Longer over shorter side of images and videos; `smart_resize` of the Qwen processors refuses more."""

    max_video_seconds: float = 384.0
    """Duration of one video. The default is 768 frames at the models' 2 frames per second."""
    max_video_frames: int = 768
    """Frames sampled from a video, further apart in a longer one. 768 is the models' `max_frames`."""
    max_video_frame_pixels: int = 4096 * 2304
    """Width times height of a video."""
    max_video_pixels: int = 90_316_800
    """Width x height x sampled frames; frames are shrunk to stay below it. The models' processors shrink to
    this number themselves (0.9 x 128000 tokens x 28 x 28 pixels), so this loses nothing that they would see:
    271 MB decoded."""

    fetch_timeout_s: float = 15.0
    """Time to fetch one URL: name lookup, redirects and the whole body."""
    max_redirects: int = 3
    """Redirects followed for one URL; each is checked like the first URL."""

    def check_size(self, num_bytes: int) -> None:
        """Raises `InvalidRequestError` with code `media_too_large` for an item of more than `max_bytes`."""
        if num_bytes > self.max_bytes:
            raise InvalidRequestError(
                f"The media item is larger than the {self.max_bytes} bytes allowed.", code="media_too_large"
            )
