"""Load levels: when each request is sent, the level's progress, and its result."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TextIO

import numpy as np

from omni_server.bench.exchange import PreparedRequest
from omni_server.bench.results import Level, LoadKind, RequestRow

Send = Callable[[PreparedRequest, float], Coroutine[None, None, RequestRow]]
"""Sends a request; the float is the level's start on the clock of `time.perf_counter`."""

_TERMINAL_EVERY_S = 0.5
_FILE_EVERY_S = 10.0


@dataclass
class Progress:
    """The progress of a level, updated while it runs."""

    planned: int
    rows: list[RequestRow] = field(default_factory=list)
    in_flight: int = 0
    peak_in_flight: int = 0

    async def count(self, answer: Coroutine[None, None, RequestRow]) -> None:
        """Awaits `answer`. A cancelled request stays in flight: it counts as unfinished."""
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        self.rows.append(await answer)
        self.in_flight -= 1

    @contextlib.asynccontextmanager
    async def shown(self, label: str, out: TextIO) -> AsyncIterator[None]:
        """Within the block, writes progress to `out` periodically: one changing line on a terminal, else
        separate lines."""
        began_s = time.perf_counter()
        end = "\r" if out.isatty() else "\n"

        def line() -> str:
            failed = sum(row.failure is not None for row in self.rows)
            elapsed_s = time.perf_counter() - began_s
            return f"{label}: {len(self.rows)}/{self.planned} done, {failed} failed, {elapsed_s:.1f} s"

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


def poisson_arrivals_s(rate: float, count: int, rng: np.random.Generator) -> list[float]:
    """Arrival times of `count` independent requests, `rate` per second on average: the first at 0, the others
    after exponentially distributed gaps."""
    later: list[float] = np.cumsum(rng.exponential(1 / rate, count - 1)).tolist()
    return [0.0, *later]


async def closed_loop(
    requests: Sequence[PreparedRequest], concurrency: int, send: Send, progress: Progress, stop: asyncio.Event
) -> Level:
    """`concurrency` clients start together; each sends its share of the requests one after another."""

    async def client(share: Sequence[PreparedRequest], began_s: float) -> None:
        for request in share:
            await progress.count(send(request, began_s))

    clients = [partial(client, requests[first::concurrency]) for first in range(concurrency)]
    return await _run("closed", concurrency, clients, progress, stop)


async def open_loop(
    requests: Sequence[PreparedRequest],
    rate: float,
    arrivals_s: Sequence[float],
    send: Send,
    progress: Progress,
    stop: asyncio.Event,
) -> Level:
    """Sends each request at its time in `arrivals_s`, whether or not earlier ones have been answered."""

    async def caller(request: PreparedRequest, arrival_s: float, began_s: float) -> None:
        await asyncio.sleep(began_s + arrival_s - time.perf_counter())
        await progress.count(send(request, began_s))

    pairs = zip(requests, arrivals_s, strict=True)
    callers = [partial(caller, request, arrival_s) for request, arrival_s in pairs]
    return await _run("open", rate, callers, progress, stop)


async def _run(
    kind: LoadKind,
    load: float,
    callers: Sequence[Callable[[float], Coroutine[None, None, None]]],
    progress: Progress,
    stop: asyncio.Event,
) -> Level:
    """Runs until all callers finish or `stop` is set, which cancels the others. Each caller receives the time
    at which the level begins."""
    cpu_s, began_s = time.process_time(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(caller(began_s)) for caller in callers]
        stopping = group.create_task(stop.wait())
        stopping.add_done_callback(lambda _: [task.cancel() for task in tasks])
        await asyncio.wait(tasks)
        interrupted = stop.is_set()
        stopping.cancel()
    return Level.of(
        kind,
        load,
        progress.rows,
        client_cpu_s=time.process_time() - cpu_s,
        peak_in_flight=progress.peak_in_flight,
        unfinished=progress.in_flight,
        interrupted=interrupted,
    )
