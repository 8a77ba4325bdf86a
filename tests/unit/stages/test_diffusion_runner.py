"""The diffusion model runner, over a base class that only loads a model."""

import re
from collections.abc import Callable

import pytest
import torch
from vllm.config import LoadConfig
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from omni_server.protocol.corruption import Corruption
from stages.runtime.diffusion_model import DiffusionBatch, DiffusionModel, RejectedRequestsError
from tests.unit.stages.diffusion import (
    RIGHT,
    THREE,
    EngineConfig,
    Runner,
    Sampler,
    SchedulerConfig,
    new_request,
    outcomes,
    runner_for,
    step,
    sums,
)


def test_nothing_scheduled_gives_the_empty_output() -> None:
    model = Sampler(sums)
    assert runner_for(model).execute_model(step(finished=("a",))) is EMPTY_MODEL_RUNNER_OUTPUT
    assert model.batches == []


def test_a_model_of_another_kind_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(TypeError, match=r"Linear cannot run on a diffusion stage: .*DiffusionModel"):
        runner_for(torch.nn.Linear(2, 2))


class OnlySamples(DiffusionModel):
    def sample(self, batch: DiffusionBatch) -> list[torch.Tensor]:
        return sums(batch)


def test_a_model_need_only_implement_sample() -> None:
    model = OnlySamples(vllm_config=None)
    assert model.load_weights([("of.another.stage", torch.ones(1))]) == set()
    runner = runner_for(model)
    runner.prepare_model()
    assert outcomes(runner.execute_model(step(*THREE))) == RIGHT


@pytest.mark.parametrize("load_format", ["dummy", "auto"])
def test_only_a_model_without_weights_draws_its_own(load_format: str) -> None:
    class Drawing(DiffusionModel):
        has_drawn = False

        def randomize_weights(self) -> None:
            self.has_drawn = True

    model = Drawing(vllm_config=None)
    config = EngineConfig(model, load_config=LoadConfig(load_format=load_format))
    Runner(config, torch.device("cpu")).load_model()
    assert model.has_drawn == (load_format == "dummy")


def test_chunked_prefill_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="enable_chunked_prefill"):
        Runner(EngineConfig(Sampler(sums), SchedulerConfig(enable_chunked_prefill=True)), torch.device("cpu"))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda batch: sums(batch)[:-1], "3 requests with 2 tensors"),
        (lambda batch: [*sums(batch), torch.ones(3)], "3 requests with 4 tensors"),
        (lambda batch: torch.ones(3), r"a tensor of shape \[\] and type torch.float32; results are floating"),
        (lambda batch: [torch.empty(2, 0)] * 3, r"a tensor of shape \[2, 0\] and type torch.float32"),
        (lambda batch: [torch.ones(3, dtype=torch.int64)] * 3, "type torch.int64; results are floating"),
        (lambda batch: torch.full((3, 4), torch.nan), "not finite"),
        (lambda batch: torch.full((3, 4), torch.inf), "not finite"),
    ],
)
def test_an_output_that_cannot_be_right_fails_its_requests(
    answer: Callable[[DiffusionBatch], object], message: str
) -> None:
    found = outcomes(runner_for(Sampler(answer)).execute_model(step(*THREE)))
    assert list(found) == ["a", "b", "c"]
    kind = "samples" if message == "not finite" else "shape"
    for result in found.values():
        assert isinstance(result, str)
        assert result.startswith(f"corrupt data ({kind}): ")
        assert re.search(message, result)


def test_one_bad_result_leaves_the_others() -> None:
    def one_missing(batch: DiffusionBatch) -> list[torch.Tensor | None]:
        return [None if i == "b" else r for i, r in zip(batch.request_ids, sums(batch), strict=True)]

    def one_not_finite(batch: DiffusionBatch) -> list[torch.Tensor]:
        return [r / 0 if i == "b" else r for i, r in zip(batch.request_ids, sums(batch), strict=True)]

    for answer, message in ((one_missing, "AttributeError"), (one_not_finite, "not finite")):
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


def test_corrupt_data_that_the_model_was_given_is_told_as_such() -> None:
    def rejecting(batch: DiffusionBatch) -> list[torch.Tensor]:
        if "c" in batch.request_ids:
            raise RejectedRequestsError(
                {"c": Corruption("codes", "codec token 9000"), "a": "there is no voice"}
            )
        return sums(batch)

    found = outcomes(runner_for(Sampler(rejecting)).execute_model(step(*THREE)))
    assert found == {"a": "there is no voice", "b": RIGHT["b"], "c": "corrupt data (codes): codec token 9000"}


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
