"""Files as parts of a question."""

import base64
import mimetypes
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from omni_server.errors import ConfigError

MediaKind = Literal["audio", "image", "video"]

_INPUT_AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "webm", "m4a", "mp4")
"""What `input_audio.format` may say; the server tells formats by their bytes in any case."""


def media_part(kind: MediaKind, file: Path) -> JsonValue:
    """The content part that sends `file` inside the request. Raises `ConfigError` if it cannot be read."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    if not content:
        raise ConfigError(f"{file} is empty")
    data = base64.b64encode(content).decode("ascii")
    suffix = file.suffix.lower().removeprefix(".")
    if kind == "audio" and suffix in _INPUT_AUDIO_FORMATS:
        return {"type": "input_audio", "input_audio": {"data": data, "format": suffix}}
    guessed = mimetypes.guess_type(file.name)[0] or ""
    mime = guessed if guessed.startswith(f"{kind}/") else f"{kind}/*"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{mime};base64,{data}"}}
