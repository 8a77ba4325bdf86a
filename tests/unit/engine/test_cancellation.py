"""Work that goes on when the task that waits for it is cancelled."""

import asyncio
import threading

import pytest

from omni_server.engine.cancellation import in_daemon_thread, uninterrupted


class Work:
    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.has_ended = False

    async def run(self) -> str:
        await self.may_end.wait()
        self.has_ended = True
        return "done"

    async def fail(self) -> str:
        await self.run()
        raise ValueError("failed")


async def test_result_and_error_come_through() -> None:
    work = Work()
    work.may_end.set()
    assert await uninterrupted(work.run()) == "done"
    with pytest.raises(ValueError, match="failed"):
        await uninterrupted(work.fail())


async def test_cancellations_are_raised_after_the_end() -> None:
    work = Work()
    task = asyncio.create_task(uninterrupted(work.run()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.has_ended


async def test_error_is_raised_also_after_a_cancellation() -> None:
    work = Work()
    task = asyncio.create_task(uninterrupted(work.fail()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    work.may_end.set()
    with pytest.raises(ValueError, match="failed"):
        await task


async def test_a_blocking_call_waits_while_the_machine_has_no_thread_to_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, refusals = threading.Thread.start, [RuntimeError("can't start new thread")] * 2

    def started(thread: threading.Thread) -> None:
        if refusals:
            raise refusals.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    assert await asyncio.wait_for(in_daemon_thread(lambda: "done"), 10) == "done"
    assert not refusals
