import asyncio

import numpy as np
import pytest

from benchmarks.serving.exchange import PreparedRequest
from benchmarks.serving.load import Progress, closed_loop, open_loop, poisson_arrivals_s
from benchmarks.serving.results import RequestRow
from tests.unit.bench.rows import row


class Sender:
    """Answers each request when the test lets it."""

    def __init__(self, *, answers: bool) -> None:
        self.sent: list[int] = []
        self.more = asyncio.Condition()
        self._answers = answers

    async def __call__(self, request: PreparedRequest, level_began_s: float) -> RequestRow:
        async with self.more:
            self.sent.append(request.index)
            self.more.notify_all()
        await asyncio.sleep(0 if self._answers else 3600)
        return row(request.index)

    async def wait_for(self, count: int) -> None:
        async with self.more:
            await self.more.wait_for(lambda: len(self.sent) >= count)


def requests(count: int) -> list[PreparedRequest]:
    return [PreparedRequest(index, b"{}") for index in range(count)]


def test_the_same_seed_gives_the_same_arrivals() -> None:
    first, again, other = (poisson_arrivals_s(2.0, 50, np.random.default_rng(seed)) for seed in (1, 1, 2))

    assert first == again
    assert first != other


@pytest.mark.parametrize("rate", [0.5, 8.0])
def test_arrivals_have_the_rate_and_the_spread_of_a_poisson_process(rate: float) -> None:
    arrivals_s = poisson_arrivals_s(rate, 20_000, np.random.default_rng(0))

    between_s = np.diff(arrivals_s)
    assert arrivals_s[0] == 0
    assert (between_s > 0).all()
    assert between_s.mean() == pytest.approx(1 / rate, rel=0.03)
    assert between_s.std() == pytest.approx(1 / rate, rel=0.05)


async def test_a_closed_loop_sends_every_request_once_and_never_more_than_its_clients() -> None:
    sender, progress = Sender(answers=True), Progress(planned=12)

    await closed_loop(requests(12), 3, sender, progress)
    level = progress.level("closed", 3)

    assert sorted(sender.sent) == list(range(12))
    assert sorted(measured.index for measured in level.rows) == list(range(12))
    assert (level.kind, level.load, level.peak_in_flight, level.unfinished) == ("closed", 3, 3, 0)
    assert not level.interrupted


async def test_a_mistake_in_the_load_generator_is_not_hidden() -> None:
    async def broken(request: PreparedRequest, level_began_s: float) -> RequestRow:
        raise KeyError(request.index)

    with pytest.raises(ExceptionGroup) as failed:
        await closed_loop(requests(2), 1, broken, Progress(planned=2))
    assert failed.group_contains(KeyError)


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Stopped, it counts what was not answered."""
    sender, progress = Sender(answers=False), Progress(planned=5)

    running = asyncio.create_task(open_loop(requests(5), [0.0, 0.0, 0.0, 0.0, 0.001], sender, progress))
    await sender.wait_for(5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    level = progress.level("open", 2.0, interrupted=True)
    assert (level.kind, level.load, level.peak_in_flight, level.unfinished) == ("open", 2.0, 5, 5)
