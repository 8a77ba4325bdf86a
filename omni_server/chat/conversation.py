"""The turns so far, the files attached to a question, and the request for the next answer."""

import base64
import mimetypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from omni_server.errors import ConfigError

MediaKind = Literal["audio", "image", "video"]

_INPUT_AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "aac", "webm", "m4a", "mp4")
"""Values of `input_audio.format`; the server detects the format from the bytes in any case."""


def media_part(kind: MediaKind, file: Path) -> JsonValue:
    """Returns the content part with the file's bytes. Raises `ConfigError` if it is unreadable or empty."""
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


@dataclass
class Conversation:
    model: str
    voice: str | None
    """None: text only."""
    system: str | None = None
    max_tokens: int | None = None
    """For the text."""
    history: list[JsonValue] = field(default_factory=list)
    """Messages of the answered turns; a failed turn leaves nothing."""

    def body(self, question: JsonValue) -> dict[str, JsonValue]:
        """Returns the streaming request for `question`, the content of a user message."""
        messages = [*self.history, {"role": "user", "content": question}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        body: dict[str, JsonValue] = {"model": self.model, "messages": messages, "stream": True}
        if self.voice is not None:
            body["modalities"] = ["text", "audio"]
            body["audio"] = {"voice": self.voice, "format": "pcm16"}
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        return body

    def add(self, question: JsonValue, text: str) -> None:
        """Records `text` as the answer to `question`."""
        self.history += [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
