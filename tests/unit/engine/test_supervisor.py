"""What happens from the death of an engine to the next one, without engines: the steps in their order, how a
death or a hang is noticed, and when a stage is not started again."""

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from omni_server.config.stage_config import SupervisionConfig
from omni_server.engine import engine_handle, supervisor
from omni_server.engine.construction import BuiltEngine
from omni_server.engine.engine_handle import EngineHandle, Stage
from omni_server.engine.engine_processes import EngineProcesses
from omni_server.engine.start_progress import StartProgress
from omni_server.engine.supervisor import CrashLoopError, Restarts, Supervisor, until_down
from omni_server.errors import ConfigError, StageDeadError


class Handle(EngineHandle[AsyncLLM]):
    async def check_health(self) -> None:
        return

    def __init__(self, world: "World") -> None:
        super().__init__("talker", world.build)
        self._world = world

    def end_blocks(self) -> int:
        self._world.events.append("blocks ended")
        return super().end_blocks()


class World:
    """What the handle of a stage builds, and what becomes of it; notes what is asked of it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.handle = Handle(self)
        self.handle.attach(self.built())
        self.build_errors: list[Exception] = []
        self.may_build = asyncio.Event()
        self.may_build.set()
        self.do_end = True
        self.end_s = 0.0

    def built(self) -> BuiltEngine[AsyncLLM]:
        return BuiltEngine(
            cast(AsyncLLM, SimpleNamespace(errored=False)), cast(EngineProcesses, Processes(self))
        )

    def die(self) -> None:
        cast(Any, self.handle.engine).errored = True

    async def build(self, progress: StartProgress) -> BuiltEngine[AsyncLLM]:
        self.events.append("build")
        try:
            await self.may_build.wait()
        except asyncio.CancelledError:
            self.events.append("given up")
            raise
        if self.build_errors:
            raise self.build_errors.pop(0)
        self.events.append("built")
        return self.built()


class Processes:
    """Stands for `EngineProcesses`."""

    core_pid = 4711
    has_ended = False

    def __init__(self, world: World) -> None:
        self._world = world

    def why_ended(self) -> str:
        return "its engine process was killed (SIGKILL)"

    def kill(self) -> None:
        self._world.events.append("killed")

    def wait(self, timeout_s: float) -> bool:
        time.sleep(self._world.end_s)
        return self._world.do_end

    def close(self) -> None:
        self._world.events.append("closed")

    def remove_leftovers(self) -> None:
        self._world.events.append("leftovers removed")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    async def close_frontend(engine: AsyncLLM) -> bool:
        world.events.append("frontend closed")
        return True

    world = World()
    monkeypatch.setattr(supervisor, "POLL_S", 0.001)
    monkeypatch.setattr(engine_handle, "close_frontend", close_frontend)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # of all that a test run has imported: seconds
    return world


def supervised(world: World, **policy: Any) -> Supervisor:
    one = Supervisor([Stage("talker", [world.handle])], SupervisionConfig(**({"max_backoff_s": 0} | policy)))
    one.start()
    return one


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


CLEARED = ["killed", "frontend closed", "leftovers removed", "blocks ended", "closed"]


async def test_an_engine_that_died_is_cleared_away_before_the_next_is_built(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    one = supervised(world)
    world.may_build.clear()
    needing = asyncio.create_task(_needs(world))
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


async def _needs(world: World) -> None:
    async with world.handle.life.needed():
        await asyncio.Event().wait()


async def test_a_start_that_fails_is_tried_again(world: World) -> None:
    one = supervised(world)
    world.build_errors = [ConfigError("the model folder is gone")] * 2
    world.die()
    await until(lambda: "built" in world.events)
    assert world.events == [*CLEARED, "build", "build", "build", "built"]
    assert one.num_restarts == {"talker": 3}
    await one.stop()


async def test_a_crash_loop_ends(world: World, caplog: pytest.LogCaptureFixture) -> None:
    one = supervised(world, max_restarts=2)
    for number in (1, 2):
        world.die()
        await until(lambda: world.events.count("built") == number)  # noqa: B023
    assert one.failed_stage is None
    world.die()
    await until(lambda: one.failed_stage == "talker")
    assert world.handle.is_dead
    assert world.events[-len(CLEARED) :] == CLEARED, "it is cleared away all the same"
    assert "stage 'talker' has died 3 times within 600 s, and supervision.max_restarts is 2" in caplog.text
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


async def test_stopping_leaves_engines_that_run_alone(world: World) -> None:
    one = supervised(world)
    await asyncio.wait_for(one.stop(), 10)
    assert world.events == []
    assert not world.handle.is_dead


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


def test_without_restarts_the_first_death_is_the_last() -> None:
    with pytest.raises(CrashLoopError, match="has died 1 times"):
        Restarts("talker", SupervisionConfig(max_restarts=0), Clock()).next_delay_s()


# -- deaths and hangs are noticed, and nothing else is taken for one

HANG_S = 0.3


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
    stage: FakeStage, hang_timeout_s: float | None = HANG_S, clock: Callable[[], float] = time.monotonic
) -> asyncio.Task[str]:
    return asyncio.create_task(until_down(cast(EngineHandle[Any], stage), hang_timeout_s, clock))


async def calls(stage: FakeStage, number: int) -> None:
    async with asyncio.timeout(10):
        while stage.num_calls < number:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.usefixtures("fast")
async def test_a_dead_engine_is_noticed() -> None:
    stage = FakeStage()
    watch = watched(stage)
    await calls(stage, 2)
    stage.is_dead = True
    assert await asyncio.wait_for(watch, 10) == "gone"


@pytest.mark.usefixtures("fast")
async def test_an_engine_that_does_not_answer_hangs() -> None:
    stage = FakeStage()
    watch = watched(stage)
    await calls(stage, 3)
    stage.answers.clear()
    assert await asyncio.wait_for(watch, 10) == "its engine has not answered for 0.3 s"
    assert stage.num_waiting == 0


@pytest.mark.usefixtures("fast")
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
async def test_a_failed_health_check_is_told() -> None:
    stage = FakeStage()
    stage.error = RuntimeError("device lost")
    assert await asyncio.wait_for(watched(stage), 10) == "its health check has failed: device lost"


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
