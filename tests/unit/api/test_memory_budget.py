"""Memory that requests hold at the same time."""

import asyncio

import pytest

from omni_server.api.memory_budget import MemoryBudget
from omni_server.errors import OverloadedError


def budget_of(max_bytes: int, timeout_s: float = 30.0) -> MemoryBudget:
    return MemoryBudget(max_bytes, timeout_s, "The server is busy.")


async def wait_for(budget: MemoryBudget, num_bytes: int) -> "asyncio.Task[None]":
    """Returns when it has begun to wait."""
    waiting = asyncio.create_task(budget.acquire(num_bytes))
    await asyncio.sleep(0)
    return waiting


async def test_who_finds_too_little_waits_until_enough_is_released() -> None:
    budget = budget_of(10)
    await budget.acquire(6)
    await budget.acquire(4)
    waiting = await wait_for(budget, 8)
    budget.release(4)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    budget.release(6)
    await asyncio.wait_for(waiting, 10)
    await budget.acquire(2)
    budget.release(10)
    await budget.acquire(10)


async def test_small_requests_do_not_overtake_a_large_one() -> None:
    budget = budget_of(10)
    await budget.acquire(6)
    large = await wait_for(budget, 8)
    small = [await wait_for(budget, 1) for _ in range(20)]
    await asyncio.sleep(0.01)
    assert not any(waiting.done() for waiting in [large, *small])
    budget.release(6)
    await asyncio.wait_for(large, 10)
    assert [waiting.done() for waiting in small].count(True) <= 2
    for _ in range(9):
        budget.release(2)
    await asyncio.gather(*small)


async def test_who_waits_too_long_is_told_that_the_server_is_busy() -> None:
    budget = budget_of(10, timeout_s=0.01)
    await budget.acquire(10)
    with pytest.raises(OverloadedError, match="busy"):
        await budget.acquire(1)
    budget.release(10)
    await budget.acquire(10)


async def test_without_a_time_to_wait_there_is_enough_at_once_or_never() -> None:
    budget = budget_of(10, timeout_s=0.0)
    await budget.acquire(10)
    with pytest.raises(OverloadedError):
        await budget.acquire(1)
    budget.release(1)
    await budget.acquire(1)


async def test_who_leaves_while_waiting_acquires_nothing_and_lets_others_pass() -> None:
    budget = budget_of(10)
    await budget.acquire(6)
    large, small = await wait_for(budget, 8), await wait_for(budget, 4)
    large.cancel()
    await asyncio.wait_for(small, 10)
    budget.release(10)
    await budget.acquire(10)
