"""What has been said so far, and the request that asks the next question."""

import time
from dataclasses import dataclass, replace

from pydantic import JsonValue


@dataclass(frozen=True)
class Asked:
    """How the answers shall be."""

    model: str
    voice: str | None
    """None: text only."""
    system: str | None = None
    max_tokens: int | None = None
    """Of the text."""


@dataclass(frozen=True)
class _Turn:
    question: JsonValue
    """Content of the user's message."""
    text: str
    audio_id: str | None
    expires_at: int
    """Unix time until which the server knows `audio_id`."""


class Conversation:
    """A turn enters the history when it has been answered; one that failed leaves nothing."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self._turns: list[_Turn] = []

    def __len__(self) -> int:
        """Answered questions."""
        return len(self._turns)

    def use_voice(self, name: str) -> None:
        """From the next answer on."""
        self.asked = replace(self.asked, voice=name)

    def forget(self) -> None:
        """Start anew."""
        self._turns.clear()

    def body(self, question: JsonValue) -> dict[str, JsonValue]:
        """The streamed request that asks `question`, the content of a user's message.

        Earlier answers are referred to by their audio's id while the server keeps it, else repeated as text.
        """
        messages: list[JsonValue] = []
        if self.asked.system is not None:
            messages.append({"role": "system", "content": self.asked.system})
        now = time.time()
        for turn in self._turns:
            messages.append({"role": "user", "content": turn.question})
            if turn.audio_id is not None and turn.expires_at > now:
                messages.append({"role": "assistant", "audio": {"id": turn.audio_id}})
            else:
                messages.append({"role": "assistant", "content": turn.text})
        messages.append({"role": "user", "content": question})
        body: dict[str, JsonValue] = {"model": self.asked.model, "messages": messages, "stream": True}
        if self.asked.voice is not None:
            body["modalities"] = ["text", "audio"]
            body["audio"] = {"voice": self.asked.voice, "format": "pcm16"}
        if self.asked.max_tokens is not None:
            body["max_tokens"] = self.asked.max_tokens
        return body

    def add(self, question: JsonValue, text: str, *, audio_id: str | None = None, expires_at: int = 0) -> None:
        """`question` has been answered, or in part: then without `audio_id`, which the server does not keep."""
        self._turns.append(_Turn(question, text, audio_id, expires_at))
