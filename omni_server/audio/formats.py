"""The audio formats of answers, by their names in OpenAI's API."""

from typing import Literal, get_args

AudioFormat = Literal["wav", "mp3", "flac", "opus", "aac", "pcm16"]

AUDIO_FORMATS: tuple[AudioFormat, ...] = get_args(AudioFormat)
"""Each can be sent whole (`encode.encode`) or streamed (`encode.StreamEncoder`)."""

MEDIA_TYPES: dict[AudioFormat, str] = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "pcm16": "audio/pcm",
}
"""The `Content-Type` of each format."""


def parse_format(name: str) -> AudioFormat | None:
    """Returns the format of that name, or None. `/v1/audio/speech` calls `pcm16` `pcm`."""
    if name == "pcm":
        return "pcm16"
    return next((audio_format for audio_format in AUDIO_FORMATS if audio_format == name), None)
