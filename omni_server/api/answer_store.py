"""What earlier answers left for later requests of the same caller, in the memory of this process only."""

import time
from collections import OrderedDict
from dataclasses import dataclass

from omni_server.api.config import ApiConfig
from omni_server.api.request_record import ANONYMOUS, current_request


@dataclass(frozen=True)
class _Entry:
    data: bytes
    expires_at: int


class AnswerStore:
    """Data by id, such as the transcript of an `audio.id`; the oldest is evicted first. Another caller's ids
    are unknown."""

    def __init__(self, config: ApiConfig) -> None:
        self._config = config
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._num_bytes = 0

    def add(self, id: str, data: bytes) -> int:
        """Returns the Unix time at which the entry expires."""
        expires_at = int(time.time()) + self._config.answer_store_ttl_s
        if len(data) > self._config.answer_store_bytes:
            return expires_at  # it would evict all others, and then itself
        self._entries[_caller(), id] = _Entry(data, expires_at)
        self._num_bytes += len(data)
        while (
            len(self._entries) > self._config.answer_store_entries
            or self._num_bytes > self._config.answer_store_bytes
        ):
            _, evicted = self._entries.popitem(last=False)
            self._num_bytes -= len(evicted.data)
        return expires_at

    def find(self, id: str, *prefixes: str) -> bytes | None:
        """Returns None if the id has none of the prefixes, or is unknown, expired or evicted."""
        entry = self._entries.get((_caller(), id)) if id.startswith(prefixes) else None
        return entry.data if entry is not None and entry.expires_at > time.time() else None

    def remove(self, id: str) -> None:
        entry = self._entries.pop((_caller(), id), None)
        self._num_bytes -= 0 if entry is None else len(entry.data)


def _caller() -> str:
    """The caller of the current request."""
    record = current_request()
    return ANONYMOUS if record is None else record.caller
