"""Which steps of an autoregressive stage are put off, over a worker that only counts them."""

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from omni_server.protocol.local_socket import new_socket_name
from omni_server.protocol.runtime_config import StageRuntimeConfig, StepThrottleSpec
from stages.runtime.stage_worker import ThrottledWorkerMixin
from stages.runtime.step_throttle import BatchAnnouncer

INTERVAL_S = 0.008


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
def spec() -> StepThrottleSpec:
    return StepThrottleSpec(new_socket_name(), INTERVAL_S, max_streams=16)


@pytest.fixture
def worker(spec: StepThrottleSpec) -> Iterator[Worker]:
    worker = Worker(StageRuntimeConfig("model", step_throttle=spec))
    worker.init_device()
    yield worker
    worker.shutdown()


def steps_s(worker: Worker, num_tokens: int) -> float:
    """How long 20 steps of so many tokens take."""
    output = SchedulerOutput.make_empty()
    output.total_num_scheduled_tokens = num_tokens
    before, began = worker.num_steps, time.monotonic()
    for _ in range(20):
        worker.execute_model(output)
    assert worker.num_steps == before + 20
    return time.monotonic() - began


def test_steps_keep_their_interval_while_batches_are_computed(worker: Worker, spec: StepThrottleSpec) -> None:
    with BatchAnnouncer((spec.socket,)).announced(2):
        assert steps_s(worker, 1) >= 19 * 2 * INTERVAL_S


def test_a_step_without_tokens_is_not_put_off(worker: Worker, spec: StepThrottleSpec) -> None:
    with BatchAnnouncer((spec.socket,)).announced(2):
        assert steps_s(worker, 0) < 19 * INTERVAL_S


def test_no_step_is_put_off_without_speech(worker: Worker) -> None:
    assert steps_s(worker, 1) < 19 * INTERVAL_S


def test_ranks_other_than_the_first_and_other_stages_do_not_listen(
    worker: Worker, spec: StepThrottleSpec
) -> None:
    bystanders = [
        Worker(StageRuntimeConfig("model", step_throttle=spec), rank=1),
        Worker(StageRuntimeConfig("model")),
        Worker(None),
    ]
    with BatchAnnouncer((spec.socket,)).announced(2):
        for bystander in bystanders:
            bystander.init_device()
            assert steps_s(bystander, 1) < 19 * INTERVAL_S
            bystander.shutdown()
