"""How far a load level is, shown on stderr while it runs."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TextIO

from omni_server.bench.results import RequestRow

_TERMINAL_EVERY_S = 0.5
_FILE_EVERY_S = 10.0


@dataclass
class Progress:
    """Written by the level that runs."""

    planned: int
    rows: list[RequestRow] = field(default_factory=list)
    in_flight: int = 0
    peak_in_flight: int = 0

    @property
    def failed(self) -> int:
        return sum(row.failure is not None for row in self.rows)


@contextlib.asynccontextmanager
async def shown(label: str, progress: Progress, out: TextIO) -> AsyncIterator[None]:
    """Tells `out` every now and then: on a terminal one line that changes, elsewhere line after line."""
    began_s = time.perf_counter()
    end = "\r" if out.isatty() else "\n"

    def line() -> str:
        elapsed_s = time.perf_counter() - began_s
        done = len(progress.rows)
        return f"{label}: {done}/{progress.planned} done, {progress.failed} failed, {elapsed_s:.1f} s"

    async def repeat() -> None:
        while True:
            await asyncio.sleep(_TERMINAL_EVERY_S if out.isatty() else _FILE_EVERY_S)
            out.write(line() + end)
            out.flush()

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        out.write(line() + "\n")
        out.flush()
