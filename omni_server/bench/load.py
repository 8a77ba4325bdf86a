"""Load levels: who sends when, and what came of it."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence

import numpy as np

from omni_server.bench.exchange import PreparedRequest
from omni_server.bench.progress import Progress
from omni_server.bench.results import Level, LoadKind, RequestRow

Send = Callable[[PreparedRequest, float], Coroutine[None, None, RequestRow]]
"""Sends a request; the float is when the level began, on the clock of `time.perf_counter`."""


def poisson_arrivals_s(rate: float, count: int, rng: np.random.Generator) -> list[float]:
    """When `count` requests arrive that come independently of each other, `rate` per second on average: the first
    at 0, then after gaps that are exponentially distributed."""
    later: list[float] = np.cumsum(rng.exponential(1 / rate, count - 1)).tolist()
    return [0.0, *later]


async def closed_loop(
    requests: Sequence[PreparedRequest], concurrency: int, send: Send, progress: Progress, stop: asyncio.Event
) -> Level:
    """`concurrency` clients start together; each sends its share of the requests one after another."""
    level = _RunningLevel(send, progress)

    async def client(share: Sequence[PreparedRequest]) -> None:
        for request in share:
            await level.send(request)

    return await level.run(
        "closed", concurrency, [client(requests[first::concurrency]) for first in range(concurrency)], stop
    )


async def open_loop(
    requests: Sequence[PreparedRequest],
    rate: float,
    arrivals_s: Sequence[float],
    send: Send,
    progress: Progress,
    stop: asyncio.Event,
) -> Level:
    """Sends each request at its time of `arrivals_s`, whether or not earlier ones have been answered."""
    level = _RunningLevel(send, progress)

    async def caller(request: PreparedRequest, arrival_s: float) -> None:
        await asyncio.sleep(arrival_s - level.elapsed_s)
        await level.send(request)

    callers = [caller(request, arrival_s) for request, arrival_s in zip(requests, arrivals_s, strict=True)]
    return await level.run("open", rate, callers, stop)


class _RunningLevel:
    def __init__(self, send: Send, progress: Progress) -> None:
        self._send = send
        self._progress = progress
        self._began_s = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began_s

    async def send(self, request: PreparedRequest) -> None:
        progress = self._progress
        progress.in_flight += 1
        progress.peak_in_flight = max(progress.peak_in_flight, progress.in_flight)
        progress.rows.append(await self._send(request, self._began_s))
        progress.in_flight -= 1  # not where it was cancelled: then it is unfinished

    async def run(
        self,
        kind: LoadKind,
        load: float,
        callers: Sequence[Coroutine[None, None, None]],
        stop: asyncio.Event,
    ) -> Level:
        """Until all callers are through, or `stop` is set: then those that are not are cancelled."""
        cpu_s = time.process_time()
        self._began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(caller) for caller in callers]
            stopping = group.create_task(stop.wait())
            stopping.add_done_callback(lambda _: [task.cancel() for task in tasks])
            await asyncio.wait(tasks)
            interrupted = stop.is_set()
            stopping.cancel()
        progress = self._progress
        return Level.of(
            kind,
            load,
            progress.rows,
            client_cpu_s=time.process_time() - cpu_s,
            peak_in_flight=progress.peak_in_flight,
            unfinished=progress.in_flight,
            interrupted=interrupted,
        )
