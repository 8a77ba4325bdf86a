"""Mixed load with faults, for minutes or hours, on a server that runs: what came of it, and what it left
behind."""

import asyncio
import json
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx2

from tests.faults.supervised_server import RECOVERY_TIMEOUT_S, SupervisedServer
from tests.integration.server_process import wait_until
from tests.load.answers import Answer
from tests.load.asks import bad_asks
from tests.load.census import Census, census, leaks
from tests.load.filling import fill_caches
from tests.load.memory import SETTLED_S, Life, MemoryWatch
from tests.load.mixed_load import Faults, MixedLoad, alone, changed, until
from tests.load.realtime_load import realtime_client
from tests.load.tally import Tally
from tests.load.wire import Ask

BAD_SHARE = 0.1
ABORT_SHARE = 0.3


@dataclass(frozen=True)
class SoakPlan:
    seconds: float
    concurrency: int
    seed: int
    kill_every_s: float | None
    """A stage's process is killed so often, one stage after the other, in the first half of the time: their
    successors' memory is seen over the second. None kills none."""
    num_lengths: int = 0
    """Prompts of so many lengths (`tests.load.filling`) are sent between the halves if an engine was killed,
    while the load rests: its caches were lost with it. 0 sends none."""
    sample_every_s: float = 5.0
    settled_s: float = SETTLED_S
    """A younger process is not asked for its memory."""


@dataclass(frozen=True)
class SoakResult:
    tally: Tally
    lives: list[Life]
    kills: list[str]
    """The stages, or their replicas, in order."""
    leaked: dict[str, tuple[float, float]]
    """What was before and is after, where it differs."""
    changed: list[str]
    """Kinds of requests that, asked again afterwards, got another answer than before."""
    filled_s: float | None = None
    """When the caches of the killed engines' successors were full, in seconds since the beginning; None if
    they were not filled."""
    engines: tuple[str, ...] = ("thinker", "talker", "code2wav")

    def judged_lives(self) -> list[Life]:
        """Of each role the last process, from when its caches were full: before the run, or in the middle of
        it."""
        last = {life.role: life for life in self.lives}
        if self.filled_s is not None:
            last |= {role: life.since(self.filled_s) for role, life in last.items() if role in self.kills}
        return [life for life in last.values() if life.rss]


def port_of(server: SupervisedServer) -> int:
    port = urlsplit(server.url).port
    assert port is not None
    return port


async def warm_up(
    server: SupervisedServer, asks: list[Ask], concurrency: int, num_lengths: int = 0
) -> tuple[dict[Ask, Answer], Census]:
    """The answers that requests get alone, and what an idle server holds that has once been busy: pools of
    threads grow to their size with the first load, and stay. So do caches, with prompts of `num_lengths`
    lengths."""
    port = port_of(server)
    wanted = await alone(port, asks)
    await fill_caches(port, num_lengths)
    load = MixedLoad(port, wanted, bad=bad_asks(), bad_share=BAD_SHARE, abort_share=0, seed=0)
    tally = await load.run(concurrency, until(time.monotonic() + 5))
    assert tally.is_clean, tally.wrong + tally.lost
    with server.client() as client:
        await asyncio.to_thread(server.wait_until_idle)
        return wanted, census(server, client)


async def soak(
    server: SupervisedServer,
    wanted: Mapping[Ask, Answer],
    before: Census,
    plan: SoakPlan,
    tell: Callable[[str], None] = lambda _: None,
) -> SoakResult:
    """`wanted` and `before` as `warm_up` returns them; `tell` is told once a minute how it goes.

    Two halves, the first with kills. It lasts until the last killed engine is back; the second is shorter by
    what that takes beyond its time, and begins later by what it takes to fill caches.
    """
    port = port_of(server)
    faults = Faults()
    load = MixedLoad(
        port,
        wanted,
        bad=bad_asks(),
        bad_share=BAD_SHARE,
        abort_share=ABORT_SHARE,
        seed=plan.seed,
        faults=faults,
    )
    watch = MemoryWatch(server, plan.settled_s)
    began = time.monotonic()
    middle, end = began + plan.seconds / 2, began + plan.seconds
    killer = _Killer(server, faults, plan, middle)
    filled_s: float | None = None
    done = asyncio.Event()

    async def offer(number: int, go_on: Callable[[], bool]) -> None:
        seed = plan.seed + number
        async with asyncio.TaskGroup() as group:
            group.create_task(
                realtime_client(port, load.tally, go_on, abort_share=ABORT_SHARE, seed=seed, faults=faults)
            )
            group.create_task(load.run(plan.concurrency, go_on))

    with ExitStack() as stack:
        client = stack.enter_context(server.client())
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(_sample(watch, plan, done))
            telling = group.create_task(_tell(load.tally, began, done, tell))
            killing = group.create_task(asyncio.to_thread(killer.run))
            try:
                await offer(0, lambda: time.monotonic() < middle or not killing.done())
                if killer.killed and plan.num_lengths:
                    rested = time.monotonic()
                    await fill_caches(port, plan.num_lengths)
                    filled_s = time.monotonic() - began
                    end += time.monotonic() - rested
                await offer(1, until(end))
            finally:
                done.set()
                killer.stop()
            await asyncio.gather(watching, telling)
        await asyncio.to_thread(server.wait_until_idle)
        leaked = await asyncio.to_thread(leaks, server, client, before)
    differing = await changed(port, wanted, plan.concurrency)
    lives = [life for life in watch.lives.values() if life.rss]
    return SoakResult(load.tally, lives, killer.killed, leaked, differing, filled_s, tuple(server.engines))


async def _sample(watch: MemoryWatch, plan: SoakPlan, done: asyncio.Event) -> None:
    while not done.is_set():
        watch.sample()
        await _sleep_unless(done, plan.sample_every_s)


async def _tell(tally: Tally, began: float, done: asyncio.Event, tell: Callable[[str], None]) -> None:
    while not done.is_set():
        await _sleep_unless(done, 60)
        tell(
            f"{time.monotonic() - began:.0f} s: {tally.sent} sent, {tally.exact} exact, {tally.aborted} aborted, "
            f"{len(tally.wrong)} wrong, {len(tally.lost)} lost"
        )


async def _sleep_unless(done: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(done.wait(), seconds)
    except TimeoutError:
        return


class _Killer:
    """In a thread of its own."""

    def __init__(self, server: SupervisedServer, faults: Faults, plan: SoakPlan, end: float) -> None:
        """Kills none after `end`, of `time.monotonic`."""
        self.killed: list[str] = []
        self._server = server
        self._faults = faults
        self._every_s = plan.kill_every_s
        self._end = end
        self._chance = random.Random(plan.seed)
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        if self._every_s is None:
            return
        engines = self._server.engines
        with self._server.client() as client:
            while time.monotonic() + (pause_s := self._every_s * self._chance.uniform(0.5, 1)) < self._end:
                if self._stopped.wait(pause_s):
                    return
                self._kill(client, engines[len(self.killed) % len(engines)])

    def _kill(self, client: httpx2.Client, stage: str) -> None:
        self._faults.spans.append((time.monotonic(), float("inf")))
        pid = self._server.pid_of(stage)
        self._server.signal(stage, signal.SIGKILL)
        wait_until(lambda: self._server.pid_of(stage) != pid, RECOVERY_TIMEOUT_S)
        self._server.wait_until_up(client)
        began, _ = self._faults.spans.pop()
        self._faults.spans.append((began, time.monotonic()))
        self.killed.append(stage)


def samples_json(lives: list[Life]) -> str:
    return json.dumps(
        [
            {
                "role": life.role,
                "seconds": life.seconds,
                "rss": life.rss,
                "threads": life.threads,
                "fds": life.descriptors,
            }
            for life in lives
        ]
    )
