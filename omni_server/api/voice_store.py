"""Voices that callers have sent, in a folder or in the memory of this process."""

import hashlib
import logging
import os
import unicodedata
from functools import partial
from pathlib import Path

import msgspec

from omni_server.errors import ConfigError, InvalidRequestError
from omni_server.types import ClonedVoice

logger = logging.getLogger(__name__)

_MAX_VOICES = 1000


class StoredVoice(msgspec.Struct, frozen=True):
    """As a file, JSON."""

    name: str
    created_at: int
    consent: str
    """Who agreed that the voice is used."""
    clone: ClonedVoice


class VoiceStore:
    """Names are unique, ignoring case."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` is made if it is not there. Raises `ConfigError` if it cannot be used."""
        self._folder = folder
        self._voices: dict[str, StoredVoice] = {}
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            files = {path: path.read_bytes() for path in sorted(folder.glob("*.json"))}
        except OSError as error:
            raise ConfigError(f"cannot use the folder of voices {folder}: {error.strerror}") from None
        for path, data in files.items():
            try:
                voice = msgspec.json.decode(data, type=StoredVoice)
            except msgspec.MsgspecError as error:
                logger.warning("%s is not the file of a voice: %s", path, error)
                continue
            if path != self._path(voice.name):  # or its voice would come back after it was deleted
                logger.warning("%s is not used: the file of the voice in it has another name", path)
                continue
            self._voices[_key(voice.name)] = voice

    def names(self) -> list[str]:
        return [voice.name for voice in self._voices.values()]

    def find(self, name: str) -> StoredVoice | None:
        return self._voices.get(_key(name))

    def check_new(self, name: str) -> None:
        """Raises `InvalidRequestError` if no voice of this name can be added."""
        if self.find(name) is not None:
            raise InvalidRequestError(f"There is a voice '{name}' already: delete it first.", param="name")
        if len(self._voices) >= _MAX_VOICES:
            raise InvalidRequestError(
                f"The server keeps {_MAX_VOICES} voices at most: delete one first.", code="too_many_voices"
            )

    def add(self, voice: StoredVoice) -> None:
        """Raises the errors of `check_new`, and `OSError` if the folder cannot be written to."""
        self.check_new(voice.name)
        if (path := self._path(voice.name)) is not None:
            part = path.with_suffix(".part")
            with open(part, "wb", opener=partial(os.open, mode=0o600)) as file:
                file.write(msgspec.json.encode(voice))
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        self._voices[_key(voice.name)] = voice

    def remove(self, voice: StoredVoice) -> None:
        if (path := self._path(voice.name)) is not None:
            path.unlink(missing_ok=True)
        del self._voices[_key(voice.name)]

    def _path(self, name: str) -> Path | None:
        """The name of the file is made of letters and digits, whatever the name of the voice is."""
        if self._folder is None:
            return None
        return self._folder / f"{hashlib.sha256(_key(name).encode()).hexdigest()[:32]}.json"


def _key(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()
