"""Who needs a stage is interrupted when it goes down, and nobody else."""

import asyncio

import pytest

from omni_server.engine.engine_handle import EngineLife
from omni_server.errors import StageDeadError

REASON = "its engine process was killed (SIGKILL)"


async def waiting(life: EngineLife, then: asyncio.Event | None = None) -> None:
    async with life.needed():
        await asyncio.Event().wait() if then is None else await then.wait()


async def started(life: EngineLife, then: asyncio.Event | None = None) -> asyncio.Task[None]:
    task = asyncio.create_task(waiting(life, then))
    await asyncio.sleep(0)
    return task


async def test_a_task_that_is_cancelled_as_well_stays_cancelled() -> None:
    life = EngineLife("talker")
    task = await started(life)
    task.cancel()
    life.went_down(REASON)
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()


async def test_a_task_goes_on_unharmed_behind_the_error() -> None:
    life = EngineLife("talker")

    async def survives() -> str:
        try:
            await waiting(life)
        except StageDeadError:
            await asyncio.sleep(0)
            return "still here"
        return "never"

    task = asyncio.create_task(survives())
    await asyncio.sleep(0)
    life.went_down(REASON)
    assert await asyncio.wait_for(task, 5) == "still here"
    assert task.cancelling() == 0


async def test_the_first_of_two_needed_stages_that_goes_down_is_named() -> None:
    outer, inner = EngineLife("talker"), EngineLife("code2wav")

    async def needs_both() -> None:
        async with outer.needed(), inner.needed():
            await asyncio.Event().wait()

    for life in (outer, inner):
        outer.came_up()
        inner.came_up()
        task = asyncio.create_task(needs_both())
        await asyncio.sleep(0)
        life.went_down(REASON)
        with pytest.raises(StageDeadError) as caught:
            await asyncio.wait_for(task, 5)
        assert caught.value.stage == ("talker" if life is outer else "code2wav")
