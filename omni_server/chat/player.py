"""Sends the audio of answers to an audio player, if one is installed, and to WAV files."""

import asyncio
import shutil
import wave
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from omni_server.client.stream import SAMPLE_RATE_HZ
from omni_server.errors import ConfigError

PLAYERS = {
    "aplay": "-q -t raw -f S16_LE -r 24000 -c 1 -",
    "paplay": "--raw --format=s16le --rate=24000 --channels=1",
    # Its raw demuxer defaults to one channel; the option for that varies by version.
    "ffplay": "-nodisp -autoexit -loglevel error -f s16le -sample_rate 24000 -i -",
    "play": "-q -t raw -r 24000 -e signed -b 16 -c 1 -",
}
"""Programs that play raw 16-bit mono samples at 24 kHz from stdin, in order of preference; `play` is
SoX's."""


def find_player() -> tuple[str, ...] | None:
    """Returns the command of the first program on PATH."""
    for name, arguments in PLAYERS.items():
        if (path := shutil.which(name)) is not None:
            return (path, *arguments.split())
    return None


class Player:
    """Plays one answer while it arrives. If the program ends early, calls `on_failure`; nothing may be
    written afterwards."""

    def __init__(self, process: asyncio.subprocess.Process, on_failure: Callable[[str], None]) -> None:
        self._process = process
        self._on_failure = on_failure

    @classmethod
    async def start(cls, command: tuple[str, ...], on_failure: Callable[[str], None]) -> "Player":
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must reach this process only
        )
        return cls(process, lambda reason: on_failure(f"{command[0]} does not play: {reason}"))

    async def write(self, samples: bytes) -> None:
        """Never waits for the program: unread samples are buffered here."""
        assert self._process.stdin is not None
        if self._process.returncode is not None:
            await self._fail()
        else:
            self._process.stdin.write(samples)

    async def finish(self) -> None:
        """Returns when everything has been played."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ConnectionResetError):
            await self._process.stdin.drain()
            self._process.stdin.close()
            await self._process.stdin.wait_closed()
        if await self._process.wait() != 0:
            await self._fail()

    async def stop(self) -> None:
        """Stops playback immediately."""
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _fail(self) -> None:
        assert self._process.stderr is not None
        lines = (await self._process.stderr.read(1000)).decode(errors="replace").strip().splitlines()
        self._on_failure(lines[0] if lines else f"exit code {self._process.returncode}")


class Recordings:
    """Numbered WAV files in a folder; existing files are kept."""

    def __init__(self, folder: Path) -> None:
        """Creates the folder. Raises `ConfigError` if that fails."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--save {folder}: cannot be made: {error.strerror}") from error
        self._folder = folder
        self._number = 0

    def save(self, samples: bytes) -> Path:
        """`samples`: 16-bit mono at 24 kHz. Returns the path. Raises `ConfigError`."""
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
