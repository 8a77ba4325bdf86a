"""What happens from the death of an engine to the next one, without engines: the steps in their order, how a
death or a hang is noticed, and when a stage is not started again."""

import asyncio
import errno
import logging
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import zmq

from omni_server.config.stage_config import SupervisionConfig
from omni_server.engine import supervisor
from omni_server.engine.engine_handle import EngineHandle, Stage
from omni_server.engine.start_progress import StartProgress
from omni_server.engine.supervisor import CrashLoopError, Restarts, Supervisor, until_down
from omni_server.errors import ConfigError, StageDeadError
from tests.unit.engine.simulated_engine import CLEARED, World, needs, until


def supervised(world: World, **policy: Any) -> Supervisor:
    stages = [Stage("talker", [world.handle])]
    one = Supervisor(stages, SupervisionConfig(**({"max_backoff_s": 0} | policy)), _no_warm_up)
    one.start()
    return one


async def _no_warm_up(handle: EngineHandle) -> None:
    raise AssertionError("no other replica would serve meanwhile")


async def test_an_engine_that_died_is_cleared_away_before_the_next_is_built(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    one = supervised(world)
    world.may_build.clear()
    needing = asyncio.create_task(needs(world))
    await asyncio.sleep(0)
    with caplog.at_level(logging.INFO):
        world.die()
        await until(lambda: "build" in world.events)
        assert world.handle.is_dead
        with pytest.raises(StageDeadError, match="stage 'talker': its engine process was killed"):
            await needing
        world.may_build.set()
        await until(lambda: not world.handle.is_dead)
    assert world.events == [*CLEARED, "build", "built"]
    assert world.handle.life.reason is None
    assert one.num_restarts == {"talker": 1}
    assert one.failed_stage is None
    told = [record.getMessage() for record in caplog.records if record.name == supervisor.__name__]
    assert told[:2] == [
        "stage 'talker' runs in process 4711",
        "stage 'talker' is down: its engine process was killed (SIGKILL)",
    ]
    assert told[2].startswith("stage 'talker' runs again, after ")
    assert len(told) == 3
    await one.stop()


@pytest.mark.parametrize(
    "cause",
    [
        OSError(errno.EMFILE, "Too many open files"),
        zmq.ZMQError(errno.ENFILE),
        MemoryError(),
        RuntimeError("can't start new thread"),
    ],
    ids=repr,
)
async def test_a_start_for_which_the_machine_lacks_something_is_tried_until_it_succeeds(
    world: World, cause: Exception
) -> None:
    """However often: that says nothing about the engine."""
    one = supervised(world, max_restarts=1)
    told = ConfigError("stage 'talker' did not start")
    told.__cause__ = cause
    world.build_errors = [told] * 4
    world.die()
    await until(lambda: "built" in world.events)
    assert world.events.count("build") == 5
    assert (one.failed, one.failed_stage) == ((), None)
    await one.stop()


async def test_a_start_without_a_socket_for_its_progress_is_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = supervised(world)
    enter = StartProgress.__enter__
    calls = iter([OSError(errno.EMFILE, "Too many open files")])

    def entered(progress: StartProgress) -> StartProgress:
        for error in calls:
            raise error
        return enter(progress)

    monkeypatch.setattr(StartProgress, "__enter__", entered)
    world.die()
    await until(lambda: "built" in world.events)
    assert one.failed_stage is None
    await one.stop()


async def test_processes_that_do_not_end_are_the_end(world: World) -> None:
    """Its memory and its part of the queue are still in use."""
    one = supervised(world)
    world.do_end = False
    world.die()
    await until(lambda: one.failed_stage == "talker")
    assert world.handle.is_dead
    assert "blocks ended" not in world.events
    assert "build" not in world.events
    await one.stop()


async def test_stopping_gives_up_an_engine_that_is_being_built(world: World) -> None:
    one = supervised(world)
    world.may_build.clear()
    world.die()
    await until(lambda: "build" in world.events)
    await asyncio.wait_for(one.stop(), 10)
    assert world.events[-1] == "given up"
    assert world.handle.is_dead


async def test_stopping_waits_until_what_died_is_cleared_away(world: World) -> None:
    one = supervised(world)
    world.end_s = 0.1
    world.die()
    await until(lambda: "killed" in world.events)
    await asyncio.wait_for(one.stop(), 10)
    assert world.events == CLEARED


# -- when a stage is started again, and when it is not


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_first_restart_comes_at_once_and_later_ones_after_growing_times() -> None:
    policy = SupervisionConfig(max_restarts=7, max_backoff_s=5.0)
    restarts = Restarts("talker", policy, Clock())
    assert [restarts.next_delay_s() for _ in range(7)] == [0.0, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert restarts.count == 7


def test_too_many_deaths_within_the_window_are_a_crash_loop() -> None:
    restarts = Restarts("talker", SupervisionConfig(max_restarts=2, restart_window_s=60), Clock())
    restarts.next_delay_s()
    restarts.next_delay_s()
    with pytest.raises(CrashLoopError, match="has died 3 times within 60 s"):
        restarts.next_delay_s()


def test_restarts_are_forgotten_after_the_window() -> None:
    clock = Clock()
    restarts = Restarts("talker", SupervisionConfig(max_restarts=1, restart_window_s=60), clock)
    for _ in range(3):
        assert restarts.next_delay_s() == 0.0
        clock.now += 61
    assert restarts.count == 3


# -- deaths and hangs are noticed, and nothing else is taken for one


class FakeStage:
    """Stands for a handle."""

    why_dead = "gone"

    def __init__(self) -> None:
        self.is_dead = False
        self.answers = asyncio.Event()
        self.answers.set()
        self.error: Exception | None = None
        self.num_calls = 0
        self.num_waiting = 0

    async def check_health(self) -> None:
        self.num_calls += 1
        self.num_waiting += 1
        try:
            await self.answers.wait()
        finally:
            self.num_waiting -= 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "POLL_S", 0.005)
    monkeypatch.setattr(supervisor, "HEALTH_INTERVAL_S", 0.01)


def watched(
    stage: FakeStage, hang_timeout_s: float | None = 30.0, clock: Callable[[], float] = time.monotonic
) -> asyncio.Task[str]:
    return asyncio.create_task(until_down(cast(EngineHandle, stage), hang_timeout_s, clock))


async def calls(stage: FakeStage, number: int) -> None:
    async with asyncio.timeout(10):
        while stage.num_calls < number:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.usefixtures("fast")
async def test_an_engine_that_is_slow_to_answer_does_not() -> None:
    stage = FakeStage()
    stage.answers.clear()
    watch = watched(stage)
    await calls(stage, 1)
    await asyncio.sleep(0.1)
    stage.answers.set()
    await calls(stage, 3)
    assert not watch.done()
    watch.cancel()


@pytest.mark.usefixtures("fast")
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


@pytest.mark.usefixtures("fast")
async def test_a_call_that_fails_because_the_engine_died_is_a_death() -> None:
    stage = FakeStage()
    stage.answers.clear()
    watch = watched(stage)
    await calls(stage, 1)
    stage.is_dead = True
    stage.error = StageDeadError("talker", "it died")
    stage.answers.set()
    assert await asyncio.wait_for(watch, 10) == "gone"


@pytest.mark.usefixtures("fast")
async def test_without_a_bound_nothing_is_asked() -> None:
    stage = FakeStage()
    watch = watched(stage, None)
    await asyncio.sleep(0.1)
    assert stage.num_calls == 0
    stage.is_dead = True
    assert await asyncio.wait_for(watch, 10) == "gone"
