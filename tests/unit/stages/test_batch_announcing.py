"""Which batches of a diffusion stage the stages beside it are told of, and when."""

import contextlib
import socket
from collections.abc import Iterator

import msgspec
import pytest
import torch
from vllm.v1.core.sched.output import NewRequestData

from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from omni_server.protocol.local_socket import new_socket_name, socket_address
from stages.qwen2_5_omni.options import SolverConfig
from stages.runtime.diffusion_model import DiffusionBatch
from stages.runtime.step_throttle import BatchNotice
from tests.reference.token2wav import code2wav_stage
from tests.unit.stages.diffusion import (
    RIGHT,
    THREE,
    EngineConfig,
    Runner,
    Sampler,
    new_request,
    outcomes,
    runner_for,
    step,
    sums,
)


class Listener:
    """Stands for a stage that is throttled; remembers what it was told, as "begins" and "ends"."""

    def __init__(self) -> None:
        self.name = new_socket_name()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(socket_address(self.name))
        self.socket.setblocking(False)

    def notices(self) -> list[BatchNotice]:
        """Since the last call."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(msgspec.json.decode(self.socket.recv(256), type=BatchNotice))
        return found

    def heard(self) -> list[str]:
        """Since the last call."""
        return ["begins" if notice.is_running else "ends" for notice in self.notices()]


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.socket.close()


def among(num_streams: int) -> list[NewRequestData]:
    """`THREE`, of which the first says how many streams are active."""
    return [new_request("a", [1, 2], num_streams=num_streams), *THREE[1:]]


def announcing_runner(model: torch.nn.Module, *listeners: Listener) -> Runner:
    config = DiffusionRuntimeConfig(
        stage=code2wav_stage(
            solver=SolverConfig(num_steps=2), max_num_seqs=4, max_num_batched_tokens=16, max_model_len=8
        ),
        compute_dtype="float32",
        is_fast=False,
        announces_to=tuple(listener.name for listener in listeners),
    )
    runner = Runner(EngineConfig(model, additional_config=config), torch.device("cpu"))
    runner.load_model()
    return runner


def test_a_batch_of_several_streams_is_announced_before_it_is_run_and_its_end_after_it(
    listener: Listener,
) -> None:
    heard_inside: list[list[str]] = []

    def answer(batch: DiffusionBatch) -> list[torch.Tensor]:
        heard_inside.append(listener.heard())
        return sums(batch)

    runner = announcing_runner(Sampler(answer), listener)
    assert outcomes(runner.execute_model(step(*among(3)))) == RIGHT
    assert heard_inside == [["begins"]]
    assert listener.heard() == ["ends"]


def test_nobody_is_told_of_other_batches(listener: Listener) -> None:
    runner = announcing_runner(Sampler(sums), listener)
    assert outcomes(runner.execute_model(step(*among(1)))) == RIGHT
    runner.execute_model(step(finished=("a",)))
    runner.execute_model(step(new_request("a", [1], payload=None)))
    assert outcomes(runner.execute_model(step(*THREE))) == RIGHT, "of which nobody says how many there are"
    assert listener.heard() == []


def test_a_batch_is_computed_where_nobody_listens() -> None:
    assert outcomes(announcing_runner(Sampler(sums)).execute_model(step(*among(3)))) == RIGHT
    assert outcomes(runner_for(Sampler(sums)).execute_model(step(*among(3)))) == RIGHT


def test_a_batch_that_is_run_again_in_parts_is_announced_once(listener: Listener) -> None:
    def raising(batch: DiffusionBatch) -> list[torch.Tensor]:
        if "b" in batch.request_ids:
            raise ValueError("b is wrong")
        return sums(batch)

    runner = announcing_runner(Sampler(raising), listener)
    assert outcomes(runner.execute_model(step(*among(3)))) == RIGHT | {"b": "ValueError: b is wrong"}
    assert listener.heard() == ["begins", "ends"]


def test_the_end_of_a_batch_is_told_when_the_device_is_lost(listener: Listener) -> None:
    def lose_device(batch: DiffusionBatch) -> list[torch.Tensor]:
        raise torch.AcceleratorError("device-side assert triggered")

    with pytest.raises(torch.AcceleratorError):
        announcing_runner(Sampler(lose_device), listener).execute_model(step(*among(3)))
    assert listener.heard() == ["begins", "ends"]


def test_all_who_listen_are_told(listener: Listener) -> None:
    second = Listener()
    announcing_runner(Sampler(sums), listener, second).execute_model(step(*among(3)))
    assert [listener.heard(), second.heard()] == [["begins", "ends"]] * 2
    second.socket.close()


def test_a_batch_is_announced_with_the_streams_that_are_active(listener: Listener) -> None:
    runner = announcing_runner(Sampler(sums), listener)
    # Each window says how many there were when it was sent.
    runner.execute_model(step(new_request("b", [1], num_streams=8), new_request("c", [1], num_streams=9)))
    assert [(n.is_running, n.num_streams) for n in listener.notices()] == [(True, 9), (False, 9)]
