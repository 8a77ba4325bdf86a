"""Which steps of an autoregressive stage are put off, over a worker that only counts them."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from omni_server.protocol.give_way import GiveWaySpec
from omni_server.protocol.local_socket import new_socket_name
from omni_server.protocol.runtime_config import StageRuntimeConfig
from stages.runtime import step_throttle
from stages.runtime.stage_worker import ThrottledWorkerMixin
from stages.runtime.step_throttle import BatchAnnouncer

DEADLINE_S = 10.0


class CountingWorker:
    """Stands for vLLM's worker of either platform."""

    def __init__(self, config: StageRuntimeConfig | None, rank: int = 0) -> None:
        self.vllm_config = SimpleNamespace(additional_config=config)
        self.rank = rank
        self.num_steps = 0

    def init_device(self) -> None:
        pass

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.num_steps += 1

    def shutdown(self) -> None:
        pass


class Worker(ThrottledWorkerMixin, CountingWorker):
    pass


@pytest.fixture
def spec() -> GiveWaySpec:
    return GiveWaySpec(new_socket_name())


@pytest.fixture
def worker(spec: GiveWaySpec, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    """Waits for the end of a batch, however long it takes."""
    monkeypatch.setattr(step_throttle, "MAX_PAUSE_S", 10 * DEADLINE_S)
    monkeypatch.setattr(step_throttle, "PAUSE_SAVINGS_S", 10 * DEADLINE_S)
    worker = Worker(StageRuntimeConfig("model", gives_way=spec))
    worker.init_device()
    yield worker
    worker.shutdown()


def step(num_tokens: int) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.total_num_scheduled_tokens = num_tokens
    return output


def test_a_step_is_made_when_the_urgent_batch_has_ended(worker: Worker, spec: GiveWaySpec) -> None:
    with BatchAnnouncer((spec,)).announced(is_urgent=True, num_streams=1):
        stepping = threading.Thread(target=worker.execute_model, args=(step(1),), daemon=True)
        stepping.start()
        stepping.join(0.05)
        assert worker.num_steps == 0
    stepping.join(DEADLINE_S)
    assert worker.num_steps == 1
    assert worker.pauses()[0] == 1


def test_a_step_without_tokens_is_not_put_off(worker: Worker, spec: GiveWaySpec) -> None:
    with BatchAnnouncer((spec,)).announced(is_urgent=True, num_streams=1):
        worker.execute_model(step(0))
        assert worker.num_steps == 1


def test_no_step_is_put_off_without_speech(worker: Worker) -> None:
    for _ in range(100):
        worker.execute_model(step(1))
    assert worker.num_steps == 100
    assert worker.pauses() == (0, 0.0)


def test_ranks_other_than_the_first_and_other_stages_do_not_listen(worker: Worker, spec: GiveWaySpec) -> None:
    bystanders = [
        Worker(StageRuntimeConfig("model", gives_way=spec), rank=1),
        Worker(StageRuntimeConfig("model")),
    ]
    bystanders.append(Worker(None))
    with BatchAnnouncer((spec,)).announced(is_urgent=True, num_streams=1):
        for bystander in bystanders:
            bystander.init_device()
            bystander.execute_model(step(1))
            assert bystander.num_steps == 1
            assert bystander.pauses() == (0, 0.0)
            bystander.shutdown()
