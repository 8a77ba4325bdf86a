"""Sound out, through whatever program for it is installed."""

import asyncio
import shutil
from collections.abc import Callable
from contextlib import suppress

PLAYERS = {
    "aplay": ("-q", "-t", "raw", "-f", "S16_LE", "-r", "24000", "-c", "1", "-"),
    "paplay": ("--raw", "--format=s16le", "--rate=24000", "--channels=1"),
    # One channel is the default of its reader of samples; how to say so has changed between versions.
    "ffplay": ("-nodisp", "-autoexit", "-loglevel", "error", "-f", "s16le", "-sample_rate", "24000", "-i", "-"),
    "play": ("-q", "-t", "raw", "-r", "24000", "-e", "signed", "-b", "16", "-c", "1", "-"),
}
"""Programs that play raw 16-bit mono samples at 24 kHz from stdin, the first that is found; `play` is SoX's."""


def find_player() -> tuple[str, ...] | None:
    """The command of the first program that is on PATH."""
    for name, arguments in PLAYERS.items():
        if (path := shutil.which(name)) is not None:
            return (path, *arguments)
    return None


class Player:
    """Plays one answer while it comes. A program that ends by itself is told to `on_failure` once; its sound is
    lost."""

    def __init__(self, command: tuple[str, ...], on_failure: Callable[[str], None]) -> None:
        self._command = command
        self._on_failure = on_failure
        self._process: asyncio.subprocess.Process | None = None
        self.has_failed = False

    async def write(self, samples: bytes) -> None:
        """More sound. Never waits for the program: what it has not taken yet is kept."""
        if self.has_failed:
            return
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C is ours
            )
        assert self._process.stdin is not None
        if self._process.returncode is not None:
            await self._fail()
            return
        self._process.stdin.write(samples)

    async def finish(self) -> None:
        """Returns when everything has been played."""
        if self._process is None or self.has_failed:
            return
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ConnectionResetError):
            await self._process.stdin.drain()
            self._process.stdin.close()
            await self._process.stdin.wait_closed()
        if await self._process.wait() != 0:
            await self._fail()

    async def stop(self) -> None:
        """Silence, now."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _fail(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        self.has_failed = True
        words = (await self._process.stderr.read(1000)).decode(errors="replace").strip().splitlines()
        reason = words[0] if words else f"exit code {self._process.returncode}"
        self._on_failure(f"{self._command[0]} does not play: {reason}")
