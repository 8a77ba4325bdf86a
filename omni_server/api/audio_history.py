"""What was said in earlier answers, so that a client may refer to an answer by its `audio.id`."""

import time
from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True)
class _Entry:
    transcript: str
    expires_at: int


class AudioHistory:
    """Transcripts by audio id, in this process only. The sound itself is not kept: past turns enter the model's
    prompt as text."""

    def __init__(self, ttl_s: int, max_entries: int) -> None:
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def add(self, audio_id: str, transcript: str) -> int:
        """Remembers an answer; returns the Unix time at which it will be forgotten."""
        expires_at = int(time.time()) + self._ttl_s
        self._entries[audio_id] = _Entry(transcript, expires_at)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)
        return expires_at

    def transcript(self, audio_id: str) -> str | None:
        """None if the id is unknown or has expired."""
        entry = self._entries.get(audio_id)
        if entry is None or entry.expires_at <= time.time():
            return None
        return entry.transcript
