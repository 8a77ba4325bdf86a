"""The audio formats that answers can be asked for, by the names of OpenAI's API."""

from typing import Literal

AudioFormat = Literal["wav", "mp3", "flac", "opus", "pcm16"]

AUDIO_FORMATS: tuple[AudioFormat, ...] = ("wav", "mp3", "flac", "opus", "pcm16")
"""All that a complete answer can be encoded to. OpenAI's `aac` is not among them: libsndfile cannot write it."""

STREAMABLE_FORMATS: tuple[AudioFormat, ...] = ("pcm16", "wav", "mp3")
"""Formats of which every piece can be sent as soon as it is there (`encode.StreamEncoder`). libsndfile holds pieces
of an Ogg stream back for a second, and a FLAC file whose header was never completed is refused by readers."""

MEDIA_TYPES: dict[AudioFormat, str] = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "pcm16": "audio/pcm",
}
"""What a `Content-Type` calls each format."""


def parse_format(name: str) -> AudioFormat | None:
    """The format of that name, None if there is none. `pcm` is what `/v1/audio/speech` calls `pcm16`."""
    if name == "pcm":
        return "pcm16"
    for audio_format in AUDIO_FORMATS:
        if audio_format == name:
            return audio_format
    return None
