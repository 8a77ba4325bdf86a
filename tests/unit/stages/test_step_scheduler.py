"""Requests of many steps: how many tokens a step computes, and what leaves before a result."""

from pathlib import Path
from typing import cast

import pytest
import torch
from vllm import PoolingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request, RequestStatus

from stages.runtime.step_scheduler import StepOutput, StepScheduler
from tests.unit.stages.scheduling import make_scheduler

IMAGE_TOKENS = 16


class Engine:
    """The scheduler; the test plays the executor."""

    def __init__(self, folder: Path) -> None:
        made = make_scheduler(
            folder,
            scheduler_class=StepScheduler,  # type: ignore[arg-type]
            max_num_batched_tokens=2 * IMAGE_TOKENS,
        )
        self.scheduler = cast(Scheduler, made)

    def add(self, *names: str) -> None:
        for name in names:
            params = PoolingParams(task="plugin")
            self.scheduler.add_request(Request(name, [0] * IMAGE_TOKENS, None, params))

    def step(
        self, *, ending: str = "", events: dict[str, list[bytes]] | None = None
    ) -> tuple[list[str], list[EngineCoreOutput]]:
        """Returns the names of the requests of the step, and its outputs. `ending` gets its result."""
        scheduled = self.scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        assert set(scheduled.num_scheduled_tokens.values()) <= {IMAGE_TOKENS}  # all of an image, each time
        output = StepOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[] for _ in names],
            pooler_output=[torch.ones(1) if name in ending else None for name in names],
            events=events or {},
        )
        found = self.scheduler.update_from_output(scheduled, output)
        return names, [out for outputs in found.values() for out in outputs.outputs]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def test_a_step_computes_as_many_requests_as_its_tokens_allow(engine: Engine) -> None:
    engine.add("a", "b", "c")
    assert [engine.step()[0] for _ in range(3)] == [["a", "b"]] * 3
    engine.step(ending="a")
    assert engine.step()[0] == ["b", "c"]  # in the place of the one that ended


def test_a_request_joins_at_the_next_step(engine: Engine) -> None:
    engine.add("a")
    assert engine.step()[0] == ["a"]
    engine.add("b")
    assert engine.step()[0] == ["a", "b"]


def test_an_aborted_request_is_not_in_the_next_step(engine: Engine) -> None:
    engine.add("a", "b", "c")
    engine.step()
    engine.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    assert engine.step()[0] == ["a", "c"]


def test_events_precede_the_result_and_do_not_finish_their_request(engine: Engine) -> None:
    engine.add("a")
    _, outputs = engine.step(events={"a": [b"first", b"second"]})
    assert [(out.request_id, out.finish_reason) for out in outputs] == [("a", None)] * 2
    contents = [cast(torch.Tensor, out.pooling_output).numpy().tobytes() for out in outputs]
    assert contents == [b"first", b"second"]
    _, (result,) = engine.step(ending="a")
    assert result.finish_reason is not None


def test_events_of_a_request_that_has_ended_are_dropped(engine: Engine) -> None:
    engine.add("a")
    _, outputs = engine.step(ending="a", events={"a": [b"late"]})
    assert len(outputs) == 1
    assert not engine.scheduler.has_unfinished_requests()
