"""Clients that send a mix of requests, some of which they abort, and compare every answer with the one they
know."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.load.answers import Answer, Failure, answer_id, outcome_of
from tests.load.tally import Tally
from tests.load.wire import Ask, Cut, Reply, exchange

TIMEOUT_S = 300.0
DOWN_CODES = frozenset({"engine_dead", "thinker_down", "talker_down", "code2wav_down"})
"""What requests are told that need a stage which is down."""
PATIENCE_S = 1.0
"""Before a client whose request failed because a stage is down sends the next one."""
_WEIGHT = 0.1
"""Of the latest answer in the mean duration of its kind."""


@dataclass
class Faults:
    """When stages were made to fail. Times of `time.monotonic`."""

    spans: list[tuple[float, float]] = field(default_factory=list)
    """From the fault to the moment when the server was ready again; infinite while it is not."""

    def excuse(self, began: float, ended: float) -> bool:
        return any(first <= ended and began <= last for first, last in self.spans)


async def alone(port: int, asks: Sequence[Ask]) -> dict[Ask, Answer]:
    """The answer to each, with nothing else running."""
    answers: dict[Ask, Answer] = {}
    for number, ask in enumerate(asks):
        reply = await exchange(port, ask, f"alone-{number}", TIMEOUT_S)
        outcome = outcome_of(reply)
        assert isinstance(outcome, Answer), (ask.kind, outcome)
        answers[ask] = outcome
    return answers


async def changed(port: int, wanted: Mapping[Ask, Answer], concurrency: int) -> list[str]:
    """Asks each request again, so many at a time. Returns the kinds of those that get another answer."""
    places = asyncio.Semaphore(concurrency)

    async def answer(number: int, ask: Ask) -> Answer | Failure:
        async with places:
            return outcome_of(await exchange(port, ask, f"again-{number}", TIMEOUT_S))

    outcomes = await asyncio.gather(*(answer(number, ask) for number, ask in enumerate(wanted)))
    return [
        ask.kind
        for (ask, answer), outcome in zip(wanted.items(), outcomes, strict=True)
        if isinstance(outcome, Failure) or outcome.difference(answer) is not None
    ]


class MixedLoad:
    def __init__(
        self,
        port: int,
        wanted: Mapping[Ask, Answer],
        *,
        bad: Sequence[tuple[Ask, int]] = (),
        bad_share: float = 0.0,
        abort_share: float,
        seed: int,
        faults: Faults | None = None,
    ) -> None:
        """`wanted` has the requests and their answers; `bad` those that are refused, with the status."""
        self.tally = Tally()
        self._port = port
        self._wanted = wanted
        self._bad = bad
        self._bad_share = bad_share
        self._abort_share = abort_share
        self._seed = seed
        self._chance = random.Random(seed)
        self._faults = Faults() if faults is None else faults
        self._usual_s: dict[str, float] = {}

    async def run(self, concurrency: int, go_on: Callable[[], bool]) -> Tally:
        """As many clients, each with one request after the other for as long as `go_on` says so, asked before
        each."""

        async def client() -> None:
            while go_on():
                await self._one()

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())
        return self.tally

    async def _one(self) -> None:
        tally, chance = self.tally, self._chance
        request_id = f"load-{self._seed}-{tally.sent}"
        tally.sent += 1
        ask, status = chance.choice(list(self._wanted)), 200
        if chance.random() < self._bad_share:
            ask, status = chance.choice(self._bad)
        cut = self._cut(ask) if chance.random() < self._abort_share else None
        began = time.monotonic()
        try:
            reply = await exchange(self._port, ask, request_id, TIMEOUT_S, cut)
        except TimeoutError:
            tally.lost.append(f"{request_id} ({ask.kind}): nothing for {TIMEOUT_S:g} s")
            return
        except OSError as error:
            tally.lost.append(f"{request_id} ({ask.kind}): {error!r}")
            return
        if reply.was_cut:
            tally.aborted += 1
            tally.aborted_by_kind[ask.kind] += 1
            return
        is_excused = self._faults.excuse(began, time.monotonic())
        if status == 200:
            self._judge(request_id, ask, reply, is_excused=is_excused)
        else:
            self._judge_refusal(request_id, reply, status, is_excused=is_excused)
        if is_excused:
            await asyncio.sleep(PATIENCE_S)

    def _cut(self, ask: Ask) -> Cut:
        """At any moment: while the request is sent, and up to a little after its answer would have been
        whole."""
        chance = self._chance
        after_s = chance.uniform(0, 1.2 * self._usual_s.get(ask.kind, 2.0))
        sent_share = chance.random() if chance.random() < 0.1 else 1.0
        return Cut(
            sent_share, after_s if sent_share == 1 else min(after_s, 0.5), is_reset=chance.random() < 0.5
        )

    def _judge(self, request_id: str, ask: Ask, reply: Reply, *, is_excused: bool) -> None:
        tally = self.tally
        name = f"{request_id} ({ask.kind})"
        if not reply.is_whole:
            if is_excused and reply.status == 200 and reply.headers["content-type"].startswith("audio/"):
                tally.excused["sound file left without its end"] += 1  # all that can be told within one
            else:
                tally.lost.append(f"{name}: status {reply.status}, cut off after {len(reply.body)} bytes")
            return
        try:
            outcome = outcome_of(reply)
        except (AssertionError, KeyError, ValueError) as error:
            tally.wrong.append(f"{name}: not well-formed: {error!r}"[:500])
            return
        if isinstance(outcome, Failure):
            if is_excused and outcome.code in DOWN_CODES:
                tally.excused[outcome.code] += 1
            else:
                tally.wrong.append(f"{name}: {outcome}")
            return
        if reply.headers["x-request-id"] != request_id:
            tally.wrong.append(f"{name}: the answer is that to {reply.headers['x-request-id']}")
        elif (difference := outcome.difference(self._wanted[ask])) is not None:
            tally.wrong.append(f"{name}: {difference}")
        else:
            tally.exact += 1
            tally.by_kind[ask.kind] += 1
            usual_s = self._usual_s.setdefault(ask.kind, reply.seconds)
            self._usual_s[ask.kind] = usual_s + _WEIGHT * (reply.seconds - usual_s)
        found = answer_id(reply)
        if found is not None:
            tally.took_id(found)

    def _judge_refusal(self, request_id: str, reply: Reply, status: int, *, is_excused: bool) -> None:
        tally = self.tally
        if not reply.is_whole:
            tally.lost.append(f"{request_id}: bad input, status {reply.status}, cut off")
            return
        try:
            outcome = outcome_of(reply)
        except (AssertionError, KeyError, ValueError) as error:
            tally.wrong.append(f"{request_id}: bad input: {error!r}"[:500])
            return
        if isinstance(outcome, Failure) and outcome.status == status:
            tally.refused_as_expected += 1
        elif isinstance(outcome, Failure) and is_excused and outcome.code in DOWN_CODES:
            tally.excused[outcome.code] += 1
        else:
            tally.wrong.append(f"{request_id}: bad input: {outcome} instead of {status}")


def times(number: int) -> Callable[[], bool]:
    """True so many times."""
    left: Iterator[int] = iter(range(number))
    return lambda: next(left, None) is not None


def until(moment: float) -> Callable[[], bool]:
    """True up to a moment of `time.monotonic`."""
    return lambda: time.monotonic() < moment
