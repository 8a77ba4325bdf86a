"""Answers as files."""

import wave
from pathlib import Path

from omni_server.chat.answer import SAMPLE_RATE_HZ
from omni_server.errors import ConfigError


class Recordings:
    """Numbered WAV files in a folder; those that are there already stay."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder. Raises `ConfigError` if that fails."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--save {folder}: cannot be made: {error.strerror}") from error
        self._folder = folder
        self._number = 0

    def save(self, samples: bytes) -> Path:
        """`samples`: 16-bit mono at 24 kHz. Returns the file. Raises `ConfigError` if it cannot be written."""
        while True:
            self._number += 1
            path = self._folder / f"answer-{self._number:03}.wav"
            try:
                with path.open("xb") as file, wave.open(file, "wb") as writer:
                    writer.setnchannels(1)
                    writer.setsampwidth(2)
                    writer.setframerate(SAMPLE_RATE_HZ)
                    writer.writeframes(samples)
            except FileExistsError:
                continue
            except OSError as error:
                raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
            return path
