"""Load levels: when each request is sent, and the level's progress."""

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.serving.exchange import PreparedRequest
from benchmarks.serving.results import Level, LoadKind, Percentiles, RequestRow

Send = Callable[[PreparedRequest, float], Coroutine[None, None, RequestRow]]
"""Sends a request; the float is the level's start on the clock of `time.perf_counter`."""


@dataclass
class Progress:
    """The progress of a level, which begins with the constructor."""

    planned: int
    rows: list[RequestRow] = field(default_factory=list)
    in_flight: int = 0
    peak_in_flight: int = 0
    began_s: float = field(default_factory=time.perf_counter)
    began_cpu_s: float = field(default_factory=time.process_time)

    async def send(self, send: Send, request: PreparedRequest) -> None:
        """A cancelled request stays in flight: it counts as unfinished."""
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        self.rows.append(await send(request, self.began_s))
        self.in_flight -= 1
        if sys.stderr.isatty():
            sys.stderr.write(f"{len(self.rows)}/{self.planned} done\r")

    def level(self, kind: LoadKind, load: float, *, interrupted: bool = False) -> Level:
        """The level ends with this call."""
        rows = self.rows
        good = [row for row in rows if row.failure is None]
        wall_s = max((row.sent_s + row.end_to_end_s for row in rows), default=0.0)
        wall_s -= min((row.sent_s for row in rows), default=0.0)
        per_s = 1 / wall_s if wall_s > 0 else 0.0
        return Level(
            kind=kind,
            load=load,
            interrupted=interrupted,
            unfinished=self.in_flight,
            wall_s=wall_s,
            peak_in_flight=self.peak_in_flight,
            client_cpu_s=time.process_time() - self.began_cpu_s,
            rows=rows,
            ttft_s=Percentiles.of(row.ttft_s for row in good),
            ttfa_s=Percentiles.of(row.ttfa_s for row in good),
            rtf=Percentiles.of(row.rtf for row in good),
            largest_gap_s=Percentiles.of(row.largest_gap_s for row in good),
            underrun_s=Percentiles.of(row.underrun_s for row in good if row.samples),
            end_to_end_s=Percentiles.of(row.end_to_end_s for row in good),
            preview_s=Percentiles.of(row.preview_s for row in good),
            prompt_tokens=Percentiles.of(row.prompt_tokens for row in good),
            cached_tokens=Percentiles.of(row.cached_tokens for row in good),
            audio_s_per_s=sum(row.audio_s for row in good) * per_s,
            requests_per_s=len(good) * per_s,
            text_tokens_per_s=sum(row.text_tokens or 0 for row in good) * per_s,
        )


def poisson_arrivals_s(rate: float, count: int, rng: np.random.Generator) -> list[float]:
    """Arrival times of `count` independent requests, `rate` per second on average: the first at 0, the others
    after exponentially distributed gaps."""
    later: list[float] = np.cumsum(rng.exponential(1 / rate, count - 1)).tolist()
    return [0.0, *later]


async def closed_loop(
    requests: Sequence[PreparedRequest], concurrency: int, send: Send, progress: Progress
) -> None:
    """`concurrency` clients start together; each sends its share of the requests one after another."""

    async def client(share: Sequence[PreparedRequest]) -> None:
        for request in share:
            await progress.send(send, request)

    async with asyncio.TaskGroup() as group:
        for first in range(concurrency):
            group.create_task(client(requests[first::concurrency]))


async def open_loop(
    requests: Sequence[PreparedRequest], arrivals_s: Sequence[float], send: Send, progress: Progress
) -> None:
    """Sends each request at its time in `arrivals_s`, whether or not earlier ones have been answered."""

    async def caller(request: PreparedRequest, arrival_s: float) -> None:
        await asyncio.sleep(progress.began_s + arrival_s - time.perf_counter())
        await progress.send(send, request)

    async with asyncio.TaskGroup() as group:
        for request, arrival_s in zip(requests, arrivals_s, strict=True):
            group.create_task(caller(request, arrival_s))
