"""How full a stage is: told with messages that go anyway, and when it falls idle; in vLLM's own scheduler."""

from pathlib import Path
from typing import cast

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import RequestStatus

from stages.runtime.stage_outputs import LOAD_REPORT_INTERVAL_S, LoadReport
from stages.runtime.stage_scheduler import StageScheduler
from tests.unit.stages.scheduling import Worker, make_scheduler, request


class FakeScheduler:
    """Stands for vLLM's, with counts that the test sets."""

    def __init__(self) -> None:
        self.counts = (0, 0)

    def get_request_counts(self) -> tuple[int, int]:
        return self.counts

    def get_kv_cache_usage(self) -> float:
        return 0.25


class Stage:
    def __init__(self) -> None:
        self.now = 100.0
        self.scheduler = FakeScheduler()
        self.report = LoadReport(lambda: self.now)

    def step(self, counts: tuple[int, int], *, has_message: bool) -> SchedulerStats | None:
        """What the server is told after a step that has a message for it or not."""
        self.scheduler.counts = counts
        outputs = {0: EngineCoreOutputs()} if has_message else {}
        self.report.attach(cast(Scheduler, self.scheduler), outputs)
        return outputs[0].scheduler_stats if outputs else None


def test_busy_stage_reports_with_a_message_once_per_interval() -> None:
    stage = Stage()
    first = stage.step((3, 2), has_message=True)
    assert first is not None
    assert (first.num_running_reqs, first.num_waiting_reqs, first.kv_cache_usage) == (3, 2, 0.25)
    stage.now += LOAD_REPORT_INTERVAL_S / 2
    assert stage.step((4, 0), has_message=True) is None
    stage.now += LOAD_REPORT_INTERVAL_S / 2
    assert stage.step((4, 0), has_message=False) is None  # no message is made for it
    assert stage.step((4, 0), has_message=True) is not None


@pytest.mark.parametrize("has_message", [True, False])
def test_stage_that_falls_idle_says_so_at_once_and_only_once(has_message: bool) -> None:
    stage = Stage()
    assert stage.step((1, 0), has_message=True) is not None
    idle = stage.step((0, 0), has_message=has_message)
    assert idle is not None
    assert (idle.num_running_reqs, idle.num_waiting_reqs) == (0, 0)
    stage.now += 10 * LOAD_REPORT_INTERVAL_S
    assert stage.step((0, 0), has_message=False) is None


def test_statistics_of_vllm_itself_are_left_alone() -> None:
    theirs = SchedulerStats(num_running_reqs=9)
    outputs = {0: EngineCoreOutputs(scheduler_stats=theirs)}
    LoadReport().attach(cast(Scheduler, FakeScheduler()), outputs)
    assert outputs[0].scheduler_stats is theirs


@pytest.fixture
def scheduler(tmp_path: Path) -> StageScheduler:
    return make_scheduler(tmp_path, max_num_seqs=1)


@pytest.mark.parametrize("end", ["finished", "aborted"])
def test_scheduler_tells_what_runs_and_waits_until_nothing_does(end: str, scheduler: StageScheduler) -> None:
    worker = Worker(scheduler)
    for request_id in ("a", "b"):
        scheduler.add_request(request(request_id, 3, None, max_tokens=2))
    stats = worker.messages(worker.schedule())[0].scheduler_stats
    assert stats is not None
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (1, 1)
    assert 0 < stats.kv_cache_usage < 1
    told: list[SchedulerStats | None] = []
    if end == "aborted":
        scheduler.finish_requests(["a", "b"], RequestStatus.FINISHED_ABORTED)
    while scheduler.has_requests():
        told += [group.scheduler_stats for group in worker.messages(worker.schedule()).values()]
    last = told[-1]
    assert last is not None
    assert (last.num_running_reqs, last.num_waiting_reqs, last.kv_cache_usage) == (0, 0, 0.0)
