"""The audio formats that answers can be asked for, by the names of OpenAI's API."""

from typing import Literal, get_args

AudioFormat = Literal["wav", "mp3", "flac", "opus", "aac", "pcm16"]

AUDIO_FORMATS: tuple[AudioFormat, ...] = get_args(AudioFormat)
"""Every one can be sent whole (`encode.encode`) and while it is made (`encode.StreamEncoder`)."""

MEDIA_TYPES: dict[AudioFormat, str] = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "pcm16": "audio/pcm",
}
"""What a `Content-Type` calls each format."""


def parse_format(name: str) -> AudioFormat | None:
    """The format of that name, None if there is none. `pcm` is what `/v1/audio/speech` calls `pcm16`."""
    if name == "pcm":
        return "pcm16"
    return next((audio_format for audio_format in AUDIO_FORMATS if audio_format == name), None)
