"""More requests than a server can answer: what becomes of those that it accepts, and of those that it
refuses."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.load.answers import Answer, Failure, outcome_of
from tests.load.mixed_load import TIMEOUT_S, MixedLoad, until
from tests.load.wire import Ask, Reply, exchange

REFUSED = "server_overloaded"


@dataclass(frozen=True)
class Accepted:
    seconds: float
    first_sound_s: float | None


@dataclass
class OverloadResult:
    offered: int = 0
    accepted: list[Accepted] = field(default_factory=list)
    """Answered, as they would have been alone."""
    refused_s: list[float] = field(default_factory=list)
    """From the beginning of the connection to the last byte of a 503 with Retry-After."""
    bad: Counter[str] = field(default_factory=Counter)
    """Anything else, by what it was."""
    lag_s: list[float] = field(default_factory=list)
    """By which the generator of the load was late with a request. What it adds to the times above is its
    own."""
    drained_s: float = 0.0
    """From the last request that was offered to the end of all answers."""

    @property
    def is_clean(self) -> bool:
        return not self.bad and self.offered == len(self.accepted) + len(self.refused_s)


async def capacity(port: int, wanted: Mapping[Ask, Answer], concurrency: int, seconds: float) -> float:
    """Requests per second that are answered when as many clients wait for their answers all the time."""
    load = MixedLoad(port, wanted, abort_share=0, seed=0)
    began = time.monotonic()
    tally = await load.run(concurrency, until(began + seconds))
    assert tally.is_clean, tally.wrong + tally.lost
    return tally.exact / (time.monotonic() - began)


async def overload(
    port: int, wanted: Mapping[Ask, Answer], rate: float, seconds: float, seed: int
) -> OverloadResult:
    """Offers `rate` requests per second, which come independently of each other and do not wait for one
    another."""
    chance = random.Random(seed)
    asks = list(wanted)
    result = OverloadResult()
    began = time.monotonic()
    at_s = 0.0
    async with asyncio.TaskGroup() as group:
        while (at_s := at_s + chance.expovariate(rate)) < seconds:
            await asyncio.sleep(began + at_s - time.monotonic())
            result.lag_s.append(time.monotonic() - began - at_s)
            group.create_task(_offer(port, wanted, chance.choice(asks), f"overload-{result.offered}", result))
            result.offered += 1
        last = time.monotonic()
    result.drained_s = time.monotonic() - last
    return result


async def first_answer_s(port: int, wanted: Mapping[Ask, Answer]) -> float:
    """Seconds until the server answers a request again, asked again and again."""
    began = time.monotonic()
    ask = next(iter(wanted))
    while True:
        outcome = outcome_of(await exchange(port, ask, "again", TIMEOUT_S))
        if isinstance(outcome, Answer):
            return time.monotonic() - began
        assert outcome.code == REFUSED, outcome
        await asyncio.sleep(0.05)


async def _offer(
    port: int, wanted: Mapping[Ask, Answer], ask: Ask, name: str, result: OverloadResult
) -> None:
    try:
        reply = await exchange(port, ask, name, TIMEOUT_S)
    except (TimeoutError, OSError) as error:
        result.bad[repr(error)] += 1
        return
    problem = _take(reply, wanted[ask], result)
    if problem is not None:
        result.bad[problem] += 1


def _take(reply: Reply, wanted: Answer, result: OverloadResult) -> str | None:
    """What is wrong with the reply; None if nothing is."""
    if not reply.is_whole:
        return f"status {reply.status}, cut off"
    outcome = outcome_of(reply)
    if isinstance(outcome, Failure):
        if outcome.status != 503 or outcome.code != REFUSED or outcome.retry_after is None:
            return str(outcome)
        result.refused_s.append(reply.seconds)
        return None
    result.accepted.append(Accepted(reply.seconds, reply.first_sound_s))
    return outcome.difference(wanted)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]
