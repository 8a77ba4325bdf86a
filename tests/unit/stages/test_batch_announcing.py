"""Which batches of a diffusion stage the stages beside it are told of, and when."""

import contextlib
import socket
from collections.abc import Iterator

import pytest
import torch

from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from omni_server.protocol.give_way import BatchNotice, GiveWaySpec, decode_notice
from omni_server.protocol.local_socket import new_socket_name, socket_address
from stages.qwen2_5_omni.options import SolverConfig
from stages.runtime.diffusion_model import DiffusionBatch
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
    """Stands for a stage that gives way; remembers what it was told, as "begins" and "ends"."""

    def __init__(self) -> None:
        self.spec = GiveWaySpec(new_socket_name())
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(socket_address(self.spec.socket))
        self.socket.setblocking(False)

    def notices(self) -> list[BatchNotice]:
        """Since the last call."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(decode_notice(self.socket.recv(256)))
        return found

    def heard(self) -> list[str]:
        """Since the last call."""
        return ["begins" if notice.is_running else "ends" for notice in self.notices()]


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.socket.close()


class HurriedSampler(Sampler):
    """Finds a batch urgent that holds the request "a"."""

    num_asked = 0

    def is_urgent(self, batch: DiffusionBatch) -> bool:
        self.num_asked += 1
        return "a" in batch.request_ids


def announcing_runner(model: torch.nn.Module, *listeners: Listener) -> Runner:
    config = DiffusionRuntimeConfig(
        stage=code2wav_stage(
            solver=SolverConfig(num_steps=2), max_num_seqs=4, max_num_batched_tokens=16, max_model_len=8
        ),
        compute_dtype="float32",
        is_fast=False,
        announces_to=tuple(listener.spec for listener in listeners),
    )
    runner = Runner(EngineConfig(model, additional_config=config), torch.device("cpu"))
    runner.load_model()
    return runner


def test_an_urgent_batch_is_announced_before_it_is_run_and_its_end_after_it(listener: Listener) -> None:
    heard_inside: list[list[str]] = []

    def answer(batch: DiffusionBatch) -> list[torch.Tensor]:
        heard_inside.append(listener.heard())
        return sums(batch)

    runner = announcing_runner(HurriedSampler(answer), listener)
    assert outcomes(runner.execute_model(step(*THREE))) == RIGHT
    assert heard_inside == [["begins"]]
    assert listener.heard() == ["ends"]


def test_nobody_is_told_of_other_batches(listener: Listener) -> None:
    runner = announcing_runner(HurriedSampler(sums), listener)
    assert outcomes(runner.execute_model(step(*THREE[1:]))) == {"b": RIGHT["b"], "c": RIGHT["c"]}
    runner.execute_model(step(finished=("a",)))
    runner.execute_model(step(new_request("a", [1], payload=None)))
    assert listener.heard() == []


def test_a_model_that_does_not_tell_has_no_announcer(listener: Listener) -> None:
    announcing_runner(Sampler(sums), listener).execute_model(step(*THREE))
    assert listener.heard() == []


def test_where_nobody_gives_way_the_model_is_not_asked() -> None:
    model = HurriedSampler(sums)
    assert outcomes(announcing_runner(model).execute_model(step(*THREE))) == RIGHT
    assert outcomes(runner_for(model).execute_model(step(*THREE))) == RIGHT
    assert model.num_asked == 0


def test_an_urgent_batch_that_is_run_again_in_parts_is_announced_once(listener: Listener) -> None:
    def raising(batch: DiffusionBatch) -> list[torch.Tensor]:
        if "b" in batch.request_ids:
            raise ValueError("b is wrong")
        return sums(batch)

    runner = announcing_runner(HurriedSampler(raising), listener)
    assert outcomes(runner.execute_model(step(*THREE))) == RIGHT | {"b": "ValueError: b is wrong"}
    assert listener.heard() == ["begins", "ends"]


def test_the_end_of_an_urgent_batch_is_told_when_the_device_is_lost(listener: Listener) -> None:
    def lose_device(batch: DiffusionBatch) -> list[torch.Tensor]:
        raise torch.AcceleratorError("device-side assert triggered")

    with pytest.raises(torch.AcceleratorError):
        announcing_runner(HurriedSampler(lose_device), listener).execute_model(step(*THREE))
    assert listener.heard() == ["begins", "ends"]


def test_all_who_give_way_are_told(listener: Listener) -> None:
    second = Listener()
    announcing_runner(HurriedSampler(sums), listener, second).execute_model(step(*THREE))
    assert [listener.heard(), second.heard()] == [["begins", "ends"]] * 2
    second.socket.close()


@pytest.mark.parametrize("model_class", [Sampler, HurriedSampler])
def test_a_batch_is_announced_with_the_utterances_under_way_urgent_or_not(
    listener: Listener, model_class: type[Sampler]
) -> None:
    runner = announcing_runner(model_class(sums), listener)
    runner.execute_model(step(new_request("b", [1], num_streams=1)))
    assert listener.notices() == []
    # Each window says how many there were when it was sent.
    runner.execute_model(step(new_request("b", [1], num_streams=8), new_request("c", [1], num_streams=9)))
    assert [(n.is_running, n.is_urgent, n.num_streams) for n in listener.notices()] == [
        (True, False, 9),
        (False, False, 9),
    ]


def test_an_urgent_batch_of_which_nobody_said_how_many_there_are_is_announced(listener: Listener) -> None:
    announcing_runner(HurriedSampler(sums), listener).execute_model(step(*THREE))
    assert {(notice.is_urgent, notice.num_streams) for notice in listener.notices()} == {(True, 1)}
