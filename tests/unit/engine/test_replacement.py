"""One of several replicas is replaced or dies, without engines."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from omni_server.config.stage_config import SupervisionConfig
from omni_server.engine.engine_handle import EngineHandle, Stage
from omni_server.engine.supervisor import Supervisor
from omni_server.errors import ConfigError, CorruptDataError, ReplacementError, StageDeadError, StageDownError
from tests.unit.engine.simulated_engine import CLEARED, World, needs, until


class Pair:
    """A stage with two replicas, of which the second one is to be replaced."""

    def __init__(self, **policy: Any) -> None:
        self.first, self.second = World("talker/0"), World("talker/1")
        self.warmed: list[str] = []
        self.warm_up_error: Exception | None = None
        stage: Stage[EngineHandle] = Stage("talker", (self.first.handle, self.second.handle))
        supervision = SupervisionConfig(**({"max_backoff_s": 0} | policy))
        self.supervisor = Supervisor([stage], supervision, self._warm_up)
        self.supervisor.start()

    async def replace(self, name: str = "talker/1", timeout_s: float = 5.0) -> int:
        return await self.supervisor.replace(name, timeout_s)

    async def _warm_up(self, handle: EngineHandle) -> None:
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


async def test_a_request_that_comes_too_late_for_the_old_engine_fails_at_once(pair: Pair) -> None:
    """It was sent there because no other replica was up at that moment."""
    needing = asyncio.create_task(needs(pair.second))
    await asyncio.sleep(0)
    await pair.replace()
    with pytest.raises(StageDeadError, match="it has been shut down"):
        await asyncio.wait_for(needing, 5)


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


async def test_a_replica_that_has_failed_is_started_again_when_the_window_allows_it(world: World) -> None:
    pair = Pair(max_restarts=1, restart_window_s=0.3)
    pair.second.build_errors = [ConfigError("invalid argument")] * 2
    pair.second.die()
    await until(lambda: pair.supervisor.failed == ("talker/1",))
    assert pair.second.handle.is_dead
    await until(lambda: "built" in pair.second.events)
    assert pair.second.events.count("build") == 3
    await until(lambda: pair.supervisor.failed == ())
    assert pair.supervisor.failed_stage is None
    await pair.supervisor.stop()


async def test_the_server_ends_if_the_others_fail_while_a_replica_waits_for_its_window(world: World) -> None:
    pair = Pair(max_restarts=1)
    for one in (pair.second, pair.first):
        assert pair.supervisor.failed_stage is None
        one.build_errors = [ConfigError("invalid argument")] * 9
        one.die()
        await until(lambda: one.handle.name in pair.supervisor.failed)  # noqa: B023
    assert pair.supervisor.failed_stage == "talker"
    await pair.supervisor.stop()


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
