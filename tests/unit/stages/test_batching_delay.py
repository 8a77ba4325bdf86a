"""Requests that come at the same moment go into the same step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import PoolingParams
from vllm.config import KVTransferConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from omni_server.protocol.diffusion import STREAMS_KEY
from omni_server.protocol.rows import RowsOutput
from omni_server.protocol.runtime_config import QueueSpec
from stages.runtime.batching_delay import AFTER_STEP_S, BatchingDelay, BatchingScheduler
from stages.runtime.stage_scheduler import StageScheduler
from tests.unit.stages.scheduling import OWN_DELAY, make_scheduler, request

PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.006


class Stage:
    """The scheduler, and the time that it sees."""

    def __init__(self, folder: Path, scheduler_class: type[Any], **kwargs: Any) -> None:
        self.now = 100.0
        delay = BatchingDelay(PAUSE_S, LONGEST_PAUSE_S, lambda: self.now)
        self.scheduler: Scheduler = make_scheduler(
            folder, scheduler_class=scheduler_class, batching_delay=delay, **kwargs
        )

    def arrive(self, *names: str, max_tokens: int = 1, is_spoken: bool = True) -> None:
        rows = RowsOutput(voice="Chelsie") if is_spoken else None
        for name in names:
            self.scheduler.add_request(request(name, 10, rows, max_tokens=max_tokens))

    def arrive_window(self, name: str, extra: dict[str, int]) -> None:
        params = PoolingParams(task="plugin", extra_kwargs=extra)
        self.scheduler.add_request(Request(name, list(range(10)), None, params))

    def step(self) -> list[str]:
        """Names of the requests that were computed; one of a single token ends with it."""
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        are_windows = any(self.scheduler.requests[name].pooling_params is not None for name in names)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[] if are_windows else [[7] for _ in names],
            pooler_output=[torch.zeros(1) for _ in names] if are_windows else None,
        )
        self.scheduler.update_from_output(output, result)
        return names


@pytest.fixture(params=[BatchingScheduler, StageScheduler])
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Stage:
    return Stage(tmp_path, request.param)


def test_those_that_come_shortly_after_the_first_are_computed_with_it(stage: Stage) -> None:
    stage.arrive("a")
    assert stage.step() == []
    stage.now += 0.6 * PAUSE_S
    stage.arrive("b", "c")
    stage.now += 0.6 * PAUSE_S
    assert stage.step() == []
    stage.now += 0.6 * PAUSE_S
    assert stage.step() == ["a", "b", "c"]
    assert not stage.scheduler.has_unfinished_requests()


def test_prompts_wait_for_each_other_also_behind_one_that_stayed_alone(stage: Stage) -> None:
    for name in "abc":
        stage.arrive(name)
        assert stage.step() == []
        stage.now += PAUSE_S
        assert stage.step() == [name]
        stage.now += 1


def test_a_prompt_whose_answer_is_text_only_waits_for_nobody(tmp_path: Path) -> None:
    stage = Stage(tmp_path, StageScheduler)
    stage.arrive("text", is_spoken=False)
    assert stage.step() == ["text"]
    stage.now += 1
    stage.arrive("text again", is_spoken=False)
    stage.arrive("spoken")  # the stage is not idle, so it is in no need of company either
    assert stage.step() == ["text again", "spoken"]


def test_a_window_waits_for_those_of_others_unless_there_are_none(tmp_path: Path) -> None:
    stage = Stage(tmp_path, BatchingScheduler)
    stage.arrive_window("alone", {STREAMS_KEY: 1})
    assert stage.step() == ["alone"]
    stage.now += 1
    stage.arrive_window("first", {STREAMS_KEY: 2})
    assert stage.step() == []
    stage.arrive_window("second", {})  # whoever sent it does not know
    stage.now += PAUSE_S
    assert stage.step() == ["first", "second"]


def test_endless_arrivals_does_not_hold_up_the_first(stage: Stage) -> None:
    first_at = stage.now
    for number in range(100):
        stage.arrive(f"r{number}")
        if stage.step():
            break
        stage.now += PAUSE_S / 2
    assert stage.now - first_at == pytest.approx(LONGEST_PAUSE_S)


def test_what_came_during_a_step_is_computed_at_once_behind_it(stage: Stage) -> None:
    stage.arrive("a")
    stage.now += PAUSE_S
    stage.step()
    stage.now += 0.5 * AFTER_STEP_S
    stage.arrive("b")
    assert stage.step() == ["b"]


def test_an_abort_during_the_pause_leaves_nothing_behind(stage: Stage) -> None:
    stage.arrive("a")
    assert stage.step() == []
    stage.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    stage.now += PAUSE_S
    assert stage.step() == []
    assert not stage.scheduler.has_requests()


def test_workers_are_told_of_requests_that_have_ended_in_a_pause_too(stage: Stage) -> None:
    stage.arrive("a", "b")
    stage.now += PAUSE_S
    stage.step()
    stage.now += 2 * AFTER_STEP_S
    stage.arrive("c")
    output = stage.scheduler.schedule()
    assert output.total_num_scheduled_tokens == 0
    assert output.finished_req_ids == {"a", "b"}


def test_a_request_that_a_pause_has_interrupted_comes_back_with_its_tokens(stage: Stage) -> None:
    """A V1 worker forgets requests that are not in a step, and asks for these tokens with async
    scheduling."""
    stage.arrive("a", max_tokens=3)
    stage.now += PAUSE_S
    assert stage.step() == ["a"]
    stage.now += 2 * AFTER_STEP_S
    stage.arrive("b")
    assert stage.step() == []
    stage.now += PAUSE_S
    cached = stage.scheduler.schedule().scheduled_cached_reqs
    assert cached.req_ids == ["a"]
    assert cached.all_token_ids == {"a": [*range(10), 7]}


@pytest.mark.parametrize("scheduler_class", [BatchingScheduler, StageScheduler])
def test_a_connector_of_the_kv_cache_has_its_part_in_a_pause_too(
    tmp_path: Path, scheduler_class: type[Any]
) -> None:
    """vLLM's workers require it in each step, also in one without tokens."""
    connector = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    stage = Stage(tmp_path, scheduler_class, kv_transfer_config=connector)
    stage.arrive("a")
    output = stage.scheduler.schedule()
    assert output.total_num_scheduled_tokens == 0
    assert output.kv_connector_metadata is not None


def test_stages_that_get_prompts_and_windows_pause_and_one_that_is_fed_does_not(tmp_path: Path) -> None:
    """What a fed stage gets comes together already."""

    def pauses(scheduler_class: type[Any], **kwargs: Any) -> bool:
        scheduler = make_scheduler(tmp_path, scheduler_class=scheduler_class, **kwargs)
        return isinstance(scheduler.batching_delay, BatchingDelay)

    own = {"batching_delay": OWN_DELAY}
    assert pauses(BatchingScheduler, **own)
    assert pauses(StageScheduler, **own)
    fed = QueueSpec(capacity=2, path=None, slot_bytes=64, max_portions=1, num_consumers=1)
    assert not pauses(StageScheduler, input_queue=fed, **own)
