"""What happens from the death of an engine to the next one, without engines: the steps in their order, how a
death or a hang is noticed, and when a stage is not started again."""

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Callable
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
from omni_server.errors import ConfigError, CorruptDataError, ReplacementError, StageDeadError, StageDownError


class Handle(EngineHandle[AsyncLLM]):
    async def check_health(self) -> None:
        return

    def __init__(self, world: "World", name: str) -> None:
        super().__init__(name, world.build)
        self._world = world

    def end_blocks(self) -> int:
        self._world.events.append("blocks ended")
        return super().end_blocks()


class World:
    """What the handle of a stage builds, and what becomes of it; notes what is asked of it."""

    def __init__(self, name: str = "talker") -> None:
        self.events: list[str] = []
        self.handle = Handle(self, name)
        self.handle.attach(self.built())
        self.build_errors: list[Exception] = []
        self.may_build = asyncio.Event()
        self.may_build.set()
        self.do_end = True
        self.end_s = 0.0

    def built(self) -> BuiltEngine[AsyncLLM]:
        return BuiltEngine(
            cast(AsyncLLM, SimpleNamespace(errored=False, output_handler=None)),
            cast(EngineProcesses, Processes(self)),
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

    def terminate(self) -> None:
        self._world.events.append("asked to end")

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
    stages = [Stage("talker", [world.handle])]
    one = Supervisor(stages, SupervisionConfig(**({"max_backoff_s": 0} | policy)), _no_warm_up)
    one.start()
    return one


async def _no_warm_up(handle: EngineHandle[Any]) -> None:
    raise AssertionError("no other replica would serve meanwhile")


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


# -- a replica that is replaced


class Pair:
    """A stage with two replicas, of which the second one is to be replaced."""

    def __init__(self, **policy: Any) -> None:
        self.first, self.second = World("talker/0"), World("talker/1")
        self.warmed: list[str] = []
        self.warm_up_error: Exception | None = None
        stage: Stage[EngineHandle[Any]] = Stage("talker", (self.first.handle, self.second.handle))
        supervision = SupervisionConfig(**({"max_backoff_s": 0} | policy))
        self.supervisor = Supervisor([stage], supervision, self._warm_up)
        self.supervisor.start()

    async def replace(self, name: str = "talker/1", timeout_s: float = 5.0) -> int:
        return await self.supervisor.replace(name, timeout_s)

    async def _warm_up(self, handle: EngineHandle[Any]) -> None:
        assert handle.is_draining, "nobody else is to use it"
        self.warmed.append(handle.name)
        if self.warm_up_error is not None:
            error, self.warm_up_error = self.warm_up_error, None
            raise error


@pytest.fixture
async def pair(world: World) -> AsyncIterator[Pair]:
    pair = Pair()
    yield pair
    await pair.supervisor.stop()


KILLED = [step for step in CLEARED if step != "frontend closed"]  # that one is the other world's


async def test_a_replica_is_replaced_when_its_requests_have_left_it(pair: Pair) -> None:
    handle = pair.second.handle
    handle.num_requests = 1
    replacing = asyncio.create_task(pair.replace())
    await until(lambda: handle.is_draining)
    assert pair.second.events == []
    handle.leave()
    assert await replacing == 4711
    assert pair.second.events == ["asked to end", *KILLED, "build", "built"]
    assert (pair.warmed, handle.is_draining) == (["talker/1"], False)
    assert pair.first.events == []
    assert pair.supervisor.num_restarts == {"talker/0": 0, "talker/1": 0}


async def test_a_new_engine_is_watched_like_the_old_one(pair: Pair) -> None:
    await pair.replace()
    pair.second.events.clear()
    pair.second.die()
    await until(lambda: "built" in pair.second.events)
    assert pair.supervisor.num_restarts["talker/1"] == 1


async def test_a_replica_that_died_is_warmed_up_while_another_one_serves(pair: Pair) -> None:
    pair.second.die()
    await until(lambda: pair.warmed == ["talker/1"])
    await until(lambda: not pair.second.handle.is_draining)


async def test_a_replica_is_not_warmed_up_through_a_stage_that_is_down(pair: Pair) -> None:
    pair.warm_up_error = StageDownError("thinker")
    pair.second.die()
    await until(lambda: pair.warmed == ["talker/1"])
    await until(lambda: not pair.second.handle.is_draining)
    assert not pair.second.handle.is_dead
    assert pair.supervisor.num_restarts["talker/1"] == 1


async def test_a_replica_with_requests_that_do_not_end_is_kept(pair: Pair) -> None:
    pair.second.handle.num_requests = 1
    with pytest.raises(ReplacementError, match=r"'talker/1' still has 1 requests after 0\.01 s, and is not"):
        await pair.replace(timeout_s=0.01)
    assert pair.second.events == []
    assert not pair.second.handle.is_draining


async def test_the_last_replica_that_is_up_is_not_replaced(pair: Pair) -> None:
    pair.first.may_build.clear()
    pair.first.die()
    with pytest.raises(ReplacementError, match="stage 'talker' has no other replica that is up"):
        await pair.replace()
    assert pair.second.events == []


async def test_two_replicas_are_replaced_one_after_the_other(pair: Pair) -> None:
    pair.second.handle.num_requests = 1
    replacing = asyncio.create_task(pair.replace())
    await until(lambda: pair.second.handle.is_draining)
    with pytest.raises(ReplacementError, match="has no other replica"):
        await pair.replace("talker/0")
    with pytest.raises(ReplacementError, match="'talker/1' is being replaced already"):
        await pair.replace()
    pair.second.handle.leave()
    await replacing
    await pair.replace("talker/0")


async def test_an_unknown_replica_is_told(pair: Pair) -> None:
    with pytest.raises(ReplacementError, match="no replica 'talker/2'; replicas are talker/0, talker/1"):
        await pair.replace("talker/2")


@pytest.mark.parametrize("fails", ["start", "warm-up"])
async def test_a_new_engine_that_fails_is_started_again(pair: Pair, fails: str) -> None:
    if fails == "start":
        pair.second.build_errors = [ConfigError("the model folder is gone")]
    else:
        pair.warm_up_error = CorruptDataError("talker/1", "logits", "NaN")
    with pytest.raises(ReplacementError, match="the new engine of 'talker/1' has failed, and is restarted"):
        await pair.replace()
    await until(lambda: not pair.second.handle.is_dead)
    assert not pair.second.handle.is_draining
    assert pair.supervisor.num_restarts["talker/1"] == 1


async def test_the_server_ends_with_the_last_replica_of_a_stage(world: World) -> None:
    pair = Pair(max_restarts=0)
    pair.second.die()
    await until(lambda: pair.second.events == KILLED)
    await asyncio.sleep(0.01)
    assert pair.supervisor.failed_stage is None
    pair.first.die()
    await until(lambda: pair.supervisor.failed_stage == "talker")
    await pair.supervisor.stop()


async def test_a_replica_that_was_given_up_can_be_replaced(world: World) -> None:
    pair = Pair(max_restarts=0)
    pair.second.die()
    await until(lambda: pair.second.events == KILLED)
    await asyncio.sleep(0.01)
    await pair.replace()
    assert not pair.second.handle.is_dead
    pair.first.die()
    await until(lambda: pair.first.events == KILLED)
    await asyncio.sleep(0.01)
    assert pair.supervisor.failed_stage is None
    await pair.supervisor.stop()


async def test_stopping_gives_up_a_replacement(pair: Pair) -> None:
    pair.second.may_build.clear()
    replacing = asyncio.create_task(pair.replace())
    await until(lambda: "build" in pair.second.events)
    replacing.cancel()
    await asyncio.wait([replacing])
    await asyncio.wait_for(pair.supervisor.stop(), 10)
    assert pair.second.handle.is_dead


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
