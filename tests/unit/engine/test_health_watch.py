"""Deaths and hangs are noticed, and nothing else is taken for one."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from omni_server.engine import health_watch
from omni_server.engine.engine_processes import EngineProcesses
from omni_server.engine.health_watch import until_down
from omni_server.engine.stage_client import StageClient
from omni_server.errors import StageDeadError

HANG_S = 0.3


class FakeStage:
    """A client and its processes in one."""

    def __init__(self) -> None:
        self.is_dead = False
        self.has_ended = False
        self.answers = asyncio.Event()
        self.answers.set()
        self.error: Exception | None = None
        self.num_calls = 0
        self.num_waiting = 0

    def why_ended(self) -> str:
        return "gone"

    async def check_health(self) -> None:
        self.num_calls += 1
        self.num_waiting += 1
        try:
            await self.answers.wait()
        finally:
            self.num_waiting -= 1
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_watch, "POLL_S", 0.005)
    monkeypatch.setattr(health_watch, "HEALTH_INTERVAL_S", 0.01)


def watched(
    stage: FakeStage, hang_timeout_s: float | None = HANG_S, clock: Callable[[], float] = time.monotonic
) -> asyncio.Task[str]:
    return asyncio.create_task(
        until_down(cast(StageClient[Any], stage), cast(EngineProcesses, stage), hang_timeout_s, clock)
    )


async def calls(stage: FakeStage, number: int) -> None:
    async with asyncio.timeout(10):
        while stage.num_calls < number:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("sign", ["is_dead", "has_ended"])
async def test_a_dead_engine_is_noticed_by_either_sign(sign: str) -> None:
    stage = FakeStage()
    watch = watched(stage)
    await calls(stage, 2)
    setattr(stage, sign, True)
    assert await asyncio.wait_for(watch, 10) == "gone"


async def test_an_engine_that_does_not_answer_hangs() -> None:
    stage = FakeStage()
    watch = watched(stage)
    await calls(stage, 3)
    stage.answers.clear()
    assert await asyncio.wait_for(watch, 10) == "its engine has not answered for 0.3 s"
    assert stage.num_waiting == 0


async def test_an_engine_that_is_slow_to_answer_does_not() -> None:
    stage = FakeStage()
    stage.answers.clear()
    watch = watched(stage, 30.0)
    await calls(stage, 1)
    await asyncio.sleep(0.1)
    stage.answers.set()
    await calls(stage, 3)
    assert not watch.done()
    watch.cancel()


async def test_time_in_which_this_process_did_not_run_is_not_the_engines_silence() -> None:
    now = 0.0
    stage = FakeStage()
    stage.answers.clear()
    watch = watched(stage, 3.0, lambda: now)
    await asyncio.sleep(0)
    now = 1.0
    await calls(stage, 1)
    now = 3600.0  # Ctrl-Z, an hour later fg
    await asyncio.sleep(0.1)
    assert not watch.done()
    watch.cancel()
    await asyncio.wait([watch])


async def test_a_failed_health_check_is_told() -> None:
    stage = FakeStage()
    stage.error = RuntimeError("device lost")
    assert await asyncio.wait_for(watched(stage), 10) == "its health check has failed: device lost"


async def test_a_call_that_fails_because_the_engine_died_is_a_death() -> None:
    stage = FakeStage()
    stage.answers.clear()
    watch = watched(stage)
    await calls(stage, 1)
    stage.is_dead = True
    stage.error = StageDeadError("talker", "it died")
    stage.answers.set()
    assert await asyncio.wait_for(watch, 10) == "gone"


async def test_without_a_bound_nothing_is_asked() -> None:
    stage = FakeStage()
    watch = watched(stage, None)
    await asyncio.sleep(0.1)
    assert stage.num_calls == 0
    stage.has_ended = True
    assert await asyncio.wait_for(watch, 10) == "gone"
