"""Which pipelines Ray Serve may choose from."""

from dataclasses import dataclass, field
from typing import cast

import pytest
from ray.serve.request_router import RunningReplica

from omni_server.cli.ray.options import IS_READY
from omni_server.cli.ray.router import LessBusyOfTwo


@dataclass
class FakeReplica:
    routing_stats: dict[str, bool] = field(default_factory=dict)


READY, NOT_ASKED, DOWN = FakeReplica({IS_READY: True}), FakeReplica(), FakeReplica({IS_READY: False})


async def chosen(*replicas: FakeReplica) -> list[FakeReplica]:
    router = object.__new__(LessBusyOfTwo)  # Ray's constructor needs a running Serve
    (group,) = await router.choose_replicas(cast(list[RunningReplica], list(replicas)))
    return cast(list[FakeReplica], group)


async def test_two_of_all_are_candidates_wherever_they_are() -> None:
    replicas = [FakeReplica() for _ in range(5)]
    pairs = [await chosen(*replicas) for _ in range(200)]
    assert all(len({id(one), id(other)}) == 2 for one, other in pairs)
    assert {id(replica) for pair in pairs for replica in pair} == set(map(id, replicas))


async def test_one_is_enough() -> None:
    assert await chosen(READY) == [READY]


@pytest.mark.parametrize("up", [READY, NOT_ASKED])
async def test_a_pipeline_that_restarts_a_stage_gets_nothing_while_another_is_up(up: FakeReplica) -> None:
    for _ in range(20):
        assert await chosen(DOWN, up, DOWN) == [up]


async def test_if_all_restart_a_stage_they_refuse_by_themselves() -> None:
    assert await chosen(DOWN, DOWN) == [DOWN, DOWN]
