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
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()

    def of(self, caller: str) -> "CallerHistory":
        """What this caller was answered."""
        return CallerHistory(self, caller)

    def add(self, caller: str, audio_id: str, transcript: str) -> int:
        """Remembers an answer; returns the Unix time at which it will be forgotten."""
        expires_at = int(time.time()) + self._ttl_s
        self._entries[caller, audio_id] = _Entry(transcript, expires_at)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)
        return expires_at

    def transcript(self, caller: str, audio_id: str) -> str | None:
        """None if the id is unknown, has expired or was told to another caller."""
        entry = self._entries.get((caller, audio_id))
        if entry is None or entry.expires_at <= time.time():
            return None
        return entry.transcript


@dataclass(frozen=True)
class CallerHistory:
    """As much of a history as one API key may refer to."""

    history: AudioHistory
    caller: str

    def add(self, audio_id: str, transcript: str) -> int:
        return self.history.add(self.caller, audio_id, transcript)

    def transcript(self, audio_id: str) -> str | None:
        return self.history.transcript(self.caller, audio_id)
