"""The diffusion model runner, over a base class that only loads a model."""

import contextlib
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from vllm import PoolingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from omni_server.errors import StageError
from omni_server.protocol.diffusion import INPUT_KEY
from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig, FlowSolver
from omni_server.protocol.give_way import GiveWaySpec, decode_notice
from omni_server.protocol.local_socket import new_socket_name, socket_address
from omni_server.transport.result import decode_result
from stages.runtime.diffusion_model import DiffusionBatch, RejectedRequestsError
from stages.runtime.diffusion_runner import DiffusionModelRunnerMixin


@dataclass
class SchedulerConfig:
    enable_chunked_prefill: bool = False


@dataclass
class EngineConfig:
    model: torch.nn.Module
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    additional_config: DiffusionRuntimeConfig | None = None


class PlatformRunner:
    """What the mixin needs of vLLM's runner."""

    def __init__(self, vllm_config: EngineConfig, device: torch.device) -> None:
        self.vllm_config, self.device = vllm_config, device

    def load_model(self, load_dummy_weights: bool = False) -> None:
        self.model = self.vllm_config.model

    def get_model(self) -> torch.nn.Module:
        return self.model


class Runner(DiffusionModelRunnerMixin, PlatformRunner):
    pass


def runner_for(model: torch.nn.Module) -> Runner:
    runner = Runner(EngineConfig(model), torch.device("cpu"))
    runner.load_model()
    return runner


class Sampler(torch.nn.Module):
    """Answers by `answer`, and remembers the batches it was given."""

    def __init__(self, answer: Callable[[DiffusionBatch], object]) -> None:
        super().__init__()
        self.answer = answer
        self.batches: list[DiffusionBatch] = []

    def sample(self, batch: DiffusionBatch) -> object:
        self.batches.append(batch)
        return self.answer(batch)


def sums(batch: DiffusionBatch) -> list[torch.Tensor]:
    """A result that tells the requests apart: the sum of the token ids, three times."""
    return [ids.sum().float().expand(3) for ids in batch.token_ids]


def new_request(request_id: str, token_ids: list[int], payload: object = b"in") -> NewRequestData:
    extra = None if payload is None else {INPUT_KEY: payload}
    return NewRequestData(
        req_id=request_id,
        prompt_token_ids=token_ids,
        mm_features=[],
        sampling_params=None,
        pooling_params=PoolingParams(task="plugin", extra_kwargs=extra),
        block_ids=(),
        num_computed_tokens=0,
        lora_request=None,
    )


def step(*requests: NewRequestData, finished: tuple[str, ...] = ()) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = list(requests)
    output.num_scheduled_tokens = {r.req_id: len(r.prompt_token_ids or []) for r in requests}
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    output.finished_req_ids = set(finished)
    return output


THREE = (new_request("a", [1, 2]), new_request("b", [10]), new_request("c", [100, 200, 300]))


def outcomes(output: ModelRunnerOutput) -> dict[str, list[float] | str]:
    """Per request its result or the message of its failure, in the output's order."""
    assert list(output.req_id_to_index) == output.req_ids
    assert list(output.req_id_to_index.values()) == list(range(len(output.req_ids)))
    assert output.sampled_token_ids == [[] for _ in output.req_ids]
    assert output.pooler_output is not None
    assert len(output.pooler_output) == len(output.req_ids)
    found: dict[str, list[float] | str] = {}
    for request_id, result in zip(output.req_ids, output.pooler_output, strict=True):
        assert isinstance(result, torch.Tensor)
        assert result.device.type == "cpu"
        try:
            found[request_id] = decode_result(result, "code2wav").tolist()
        except StageError as error:
            found[request_id] = error.message.removeprefix("stage 'code2wav': ")
    return found


RIGHT = {"a": [3.0] * 3, "b": [10.0] * 3, "c": [600.0] * 3}


@pytest.mark.parametrize(
    "shape_output",
    [
        lambda batch: torch.stack(sums(batch)),
        sums,
        lambda batch: tuple(sums(batch)),
        lambda batch: dict(reversed(list(zip(batch.request_ids, sums(batch), strict=True)))),
    ],
    ids=["tensor", "list", "tuple", "dict in another order"],
)
def test_outputs_reach_their_requests_in_order(shape_output: Callable[[DiffusionBatch], object]) -> None:
    found = outcomes(runner_for(Sampler(shape_output)).execute_model(step(*THREE)))
    assert found == RIGHT
    assert list(found) == ["a", "b", "c"]


def test_results_of_different_lengths_stay_apart() -> None:
    def lengths(batch: DiffusionBatch) -> list[torch.Tensor]:
        return [ids.float() for ids in batch.token_ids]

    found = outcomes(runner_for(Sampler(lengths)).execute_model(step(*THREE)))
    assert found == {"a": [1, 2], "b": [10], "c": [100, 200, 300]}


def test_nothing_scheduled_gives_the_empty_output() -> None:
    model = Sampler(sums)
    assert runner_for(model).execute_model(step(finished=("a",))) is EMPTY_MODEL_RUNNER_OUTPUT
    assert model.batches == []


@pytest.mark.parametrize("size", [1, 64])
def test_a_batch_of_any_size_runs_at_once(size: int) -> None:
    model = Sampler(sums)
    requests = [new_request(f"r{i}", [i]) for i in range(size)]
    found = outcomes(runner_for(model).execute_model(step(*requests)))
    assert found == {f"r{i}": [float(i)] * 3 for i in range(size)}
    assert len(model.batches) == 1


def test_the_model_gets_ids_tokens_and_inputs() -> None:
    model = Sampler(sums)
    runner_for(model).execute_model(step(new_request("a", [4, 5], b"first"), new_request("b", [6], b"second")))
    (batch,) = model.batches
    assert batch.request_ids == ("a", "b")
    assert [ids.tolist() for ids in batch.token_ids] == [[4, 5], [6]]
    assert {ids.dtype for ids in batch.token_ids} == {torch.int64}
    assert batch.inputs == (b"first", b"second")


class Forwarder(torch.nn.Module):
    def forward(self, batch: DiffusionBatch) -> list[torch.Tensor]:
        return sums(batch)


class Diffuser(torch.nn.Module):
    def diffuse(self, batch: DiffusionBatch) -> list[torch.Tensor]:
        return sums(batch)


class DiffuserThatForwards(Forwarder):
    def diffuse(self, batch: DiffusionBatch) -> list[torch.Tensor]:
        raise AssertionError("forward comes first")


class SamplerThatForwards(Sampler):
    def forward(self, batch: DiffusionBatch) -> list[torch.Tensor]:
        raise AssertionError("sample comes first")


@pytest.mark.parametrize(
    "model",
    [Forwarder(), Diffuser(), DiffuserThatForwards(), SamplerThatForwards(sums)],
    ids=lambda m: type(m).__name__,
)
def test_sample_comes_before_forward_before_diffuse(model: torch.nn.Module) -> None:
    assert outcomes(runner_for(model).execute_model(step(*THREE))) == RIGHT


def test_a_model_without_any_of_them_is_refused_when_it_is_loaded() -> None:
    class Neither(torch.nn.Module):
        pass

    with pytest.raises(TypeError, match=r"Neither .* none of sample\(batch\), forward\(batch\) and diffuse\(batch\)"):
        runner_for(Neither())


def test_chunked_prefill_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="enable_chunked_prefill"):
        Runner(EngineConfig(Sampler(sums), SchedulerConfig(enable_chunked_prefill=True)), torch.device("cpu"))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda batch: sums(batch)[:-1], "3 requests with 2 tensors"),
        (lambda batch: [*sums(batch), torch.ones(3)], "3 requests with 4 tensors"),
        (lambda batch: torch.ones(2, 5), r"3 requests with a tensor \[2, 5\]"),
        (lambda batch: torch.tensor(1.0), r"3 requests with a tensor \[\]"),
        (lambda batch: None, "answered with NoneType"),
        (lambda batch: "abc", "answered with str"),
        (lambda batch: np.ones((3, 4)), "answered with ndarray"),
        (lambda batch: {**dict.fromkeys(batch.request_ids, torch.ones(2)), "x": torch.ones(2)}, "unknown requests: x"),
        (lambda batch: [np.ones(3)] * 3, "gave ndarray instead of a tensor"),
        (lambda batch: torch.ones(3), r"a tensor of shape \[\], which holds no samples"),
        (lambda batch: [torch.empty(0)] * 3, r"a tensor of shape \[0\], which holds no samples"),
        (lambda batch: [torch.empty(2, 0)] * 3, r"a tensor of shape \[2, 0\], which holds no samples"),
        (lambda batch: [torch.ones(3, dtype=torch.int64)] * 3, "type torch.int64; results are floating"),
        (lambda batch: [torch.ones(3, dtype=torch.uint8)] * 3, "type torch.uint8; results are floating"),
        (lambda batch: torch.full((3, 4), torch.nan), "not finite"),
        (lambda batch: torch.full((3, 4), torch.inf), "not finite"),
    ],
)
def test_an_output_that_cannot_be_right_fails_its_requests(
    answer: Callable[[DiffusionBatch], object], message: str
) -> None:
    found = outcomes(runner_for(Sampler(answer)).execute_model(step(*THREE)))
    assert list(found) == ["a", "b", "c"]
    for result in found.values():
        assert isinstance(result, str)
        assert re.search(message, result)


def test_one_bad_result_leaves_the_others() -> None:
    def one_missing(batch: DiffusionBatch) -> dict[str, torch.Tensor]:
        return {i: r for i, r in zip(batch.request_ids, sums(batch), strict=True) if i != "b"}

    def one_not_finite(batch: DiffusionBatch) -> list[torch.Tensor]:
        return [r / 0 if i == "b" else r for i, r in zip(batch.request_ids, sums(batch), strict=True)]

    for answer, message in ((one_missing, "no result"), (one_not_finite, "not finite")):
        found = outcomes(runner_for(Sampler(answer)).execute_model(step(*THREE)))
        assert message in found.pop("b")
        assert found == {"a": RIGHT["a"], "c": RIGHT["c"]}


def test_a_request_that_makes_the_batch_raise_fails_alone() -> None:
    def raising(batch: DiffusionBatch) -> list[torch.Tensor]:
        if "b" in batch.request_ids:
            raise RuntimeError("shapes do not fit")
        return sums(batch)

    found = outcomes(runner_for(Sampler(raising)).execute_model(step(*THREE)))
    assert found == RIGHT | {"b": "RuntimeError: shapes do not fit"}


def test_requests_that_the_model_rejects_leave_the_rest_in_one_batch() -> None:
    def rejecting(batch: DiffusionBatch) -> list[torch.Tensor]:
        if "b" in batch.request_ids:
            raise RejectedRequestsError({"b": "there is no voice 'Nobody'"})
        return sums(batch)

    model = Sampler(rejecting)
    found = outcomes(runner_for(model).execute_model(step(*THREE)))
    assert found == RIGHT | {"b": "there is no voice 'Nobody'"}
    assert [batch.request_ids for batch in model.batches] == [("a", "b", "c"), ("a", "c")]


def test_a_batch_of_rejected_requests_only_ends() -> None:
    def rejecting(batch: DiffusionBatch) -> list[torch.Tensor]:
        raise RejectedRequestsError(dict.fromkeys(batch.request_ids, "no"))

    assert outcomes(runner_for(Sampler(rejecting)).execute_model(step(*THREE))) == dict.fromkeys("abc", "no")


def test_rejecting_a_stranger_fails_the_batch_instead_of_looping() -> None:
    def rejecting(batch: DiffusionBatch) -> list[torch.Tensor]:
        raise RejectedRequestsError({"x": "no"})

    found = outcomes(runner_for(Sampler(rejecting)).execute_model(step(*THREE)))
    assert set(found.values()) == {"the model rejected requests that were not in its batch"}


@pytest.mark.parametrize("payload", [None, "text", 7])
def test_a_request_without_input_bytes_fails_alone(payload: object) -> None:
    model = Sampler(sums)
    bad = new_request("bad", [1], payload)
    found = outcomes(runner_for(model).execute_model(step(THREE[0], bad, THREE[2])))
    assert found == {"a": RIGHT["a"], "bad": "the request has no 'omni_input' of type bytes", "c": RIGHT["c"]}
    assert model.batches[0].request_ids == ("a", "c")


def test_a_lost_device_ends_the_step_and_leaves_no_request_behind() -> None:
    lost = True

    def answer(batch: DiffusionBatch) -> list[torch.Tensor]:
        if lost:
            raise torch.AcceleratorError("device-side assert triggered")
        return sums(batch)

    runner = runner_for(Sampler(answer))
    with pytest.raises(torch.AcceleratorError):
        runner.execute_model(step(*THREE))
    assert runner.num_requests == 0
    lost = False
    assert outcomes(runner.execute_model(step(*THREE))) == RIGHT


def test_no_request_is_kept_after_its_step_or_its_end() -> None:
    runner = runner_for(Sampler(sums))
    runner.execute_model(step(*THREE))
    assert runner.num_requests == 0
    unscheduled = step(*THREE)
    unscheduled.num_scheduled_tokens = {"a": 2}
    runner.execute_model(unscheduled)
    assert runner.num_requests == 2
    runner.execute_model(step(finished=("b", "c", "never seen")))
    assert runner.num_requests == 0


def test_there_is_no_kv_cache_and_nothing_to_capture() -> None:
    runner = runner_for(Sampler(sums))
    assert runner.get_kv_cache_spec() == {}
    assert runner.capture_model() == 0
    assert runner.get_supported_tasks() == ("plugin",)


class Listener:
    """Stands for a stage that gives way; remembers what it was told, as "begins" and "ends"."""

    def __init__(self) -> None:
        self.spec = GiveWaySpec(new_socket_name())
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(socket_address(self.spec.socket))
        self.socket.setblocking(False)

    def heard(self) -> list[str]:
        """Since the last call."""
        messages = []
        with contextlib.suppress(BlockingIOError):
            while True:
                messages.append("begins" if decode_notice(self.socket.recv(256)).is_running else "ends")
        return messages


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
        solver=FlowSolver(num_steps=2, guidance_scale=0.5, sway_coefficient=-1.0),
        compute_dtype="float32",
        is_fast=False,
        max_num_windows=4,
        max_num_codes=16,
        longest_window=8,
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
