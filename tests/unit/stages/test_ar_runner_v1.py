"""The runner mixin adds rows to a step's output and takes nothing away. The base is a stand-in for vLLM's V1
runner with the attributes and methods that the mixin relies on; the real one runs in tests/integration."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from omni_server.protocol.corruption import Corruption
from omni_server.protocol.rows import (
    REQUEST_KEY,
    InlineBlock,
    RowsFeed,
    RowsOutput,
    RowsPayload,
    decode_payload,
    encode,
)
from stages.runtime import ar_runner_base
from stages.runtime.ar_runner_v1 import ARModelRunnerV1Mixin
from stages.runtime.stage_step import StageStep, attach_step, attached_findings
from tests.unit.stages.runners import SENDING, WIDTH, AsyncOutput, embedded


class BaseRunner:
    """Two requests: "a" with three prompt tokens, "b" with one."""

    is_async = False
    takes_embeds = True
    empty = False

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self.vllm_config, self.device = vllm_config, device
        self.requests: dict[str, Any] = {}
        self.execute_model_state: Any = None

    def load_model(self) -> None:
        pass

    def get_model(self) -> Any:
        return SimpleNamespace(embed_input_ids=embedded)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.scheduled_new_reqs:
            self.requests = {
                r: SimpleNamespace(mrope_positions=None, mrope_position_delta=None) for r in "ab"
            }
            self.input_batch = SimpleNamespace(
                num_reqs=2, req_ids=["a", "b"], num_computed_tokens_cpu=np.zeros(2, int), generators={}
            )
            self.discard_request_mask = SimpleNamespace(np=np.zeros(2, bool))
            self.query_start_loc = SimpleNamespace(np=np.array([0, 3, 4]))

    def _preprocess(
        self, scheduler_output: SchedulerOutput, num_input_tokens: int, tensors: None = None
    ) -> Any:
        ids = torch.arange(4)
        self.input_ids = SimpleNamespace(gpu=ids)
        return None, embedded(ids) if self.takes_embeds else None

    def compute(self, scheduler_output: SchedulerOutput, step: int) -> None:
        """A forward pass whose hidden states tell which step they are of."""
        self.execute_model(scheduler_output)
        _, embeds, *_ = self._preprocess(scheduler_output, 4)
        if embeds is not None:
            embeds.fill_(torch.nan)  # the model may use its input as scratch memory
        hidden = torch.full((4, WIDTH), 10.0 * step)
        self.execute_model_state = SimpleNamespace(scheduler_output=scheduler_output, hidden_states=hidden)
        self.next_token = step

    def _get_nans_in_logits(self, logits: torch.Tensor | None) -> dict[str, int]:
        if logits is None:
            return {}
        return dict(zip(self.requests or "ab", logits.isnan().sum(1).tolist(), strict=True))

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: None) -> None:
        if logits is not None:
            logits.fill_(torch.inf)

    def sample_tokens(self, grammar_output: None) -> Any:
        if self.empty:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self.execute_model_state = None
        output = ModelRunnerOutput(
            req_ids=["a", "b"],
            req_id_to_index={"a": 0, "b": 1},
            sampled_token_ids=[[self.next_token], [self.next_token]],
            num_nans_in_logits={"a": 7, "b": 0},
        )
        return AsyncOutput(output) if self.is_async else output


class AsyncBaseRunner(BaseRunner):
    is_async = True


@pytest.fixture(params=[BaseRunner, AsyncBaseRunner], ids=["sync", "async"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(ar_runner_base, "get_tensor_model_parallel_rank", lambda: 0)
    made = type("Runner", (ARModelRunnerV1Mixin, request.param), {})(
        SimpleNamespace(additional_config=SENDING, model_config=SimpleNamespace(uses_mrope=False)),
        torch.device("cpu"),
    )
    made.load_model()
    return made


def step(new: bool = False, finished: tuple[str, ...] = ()) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.finished_req_ids = set(finished)
    if new:
        params = SamplingParams(extra_args={REQUEST_KEY: encode(RowsOutput(voice="v"))})
        output.scheduled_new_reqs = [
            SimpleNamespace(req_id="a", sampling_params=params, prompt_token_ids=[1, 2, 3], mm_features=[]),
            SimpleNamespace(
                req_id="b", sampling_params=SamplingParams(), prompt_token_ids=[4], mm_features=[]
            ),
        ]
    return output


def finished_output(output: Any) -> ModelRunnerOutput:
    return output.get_output() if isinstance(output, AsyncModelRunnerOutput) else output


def test_nan_counts_and_tokens_of_the_step_survive(runner: Any) -> None:
    runner.compute(step(new=True), 1)
    output = finished_output(runner.sample_tokens(None))
    assert output.num_nans_in_logits == {"a": 7, "b": 0}
    assert output.sampled_token_ids == [[1], [1]]
    assert output.req_ids == ["a", "b"]


@pytest.mark.parametrize("takes_embeds", [True, False])
def test_rows_use_the_input_as_it_was_before_the_forward_pass(runner: Any, takes_embeds: bool) -> None:
    runner.takes_embeds = takes_embeds
    runner.compute(step(new=True), 1)
    message = finished_output(runner.sample_tokens(None)).pooler_output[0]
    rows = _rows(decode_payload(bytes(message.numpy())))
    assert torch.equal(rows[:3], torch.tensor([[10.0], [11.0], [12.0]]).expand(-1, WIDTH))


def test_rows_that_are_not_finite_are_told_with_their_step(runner: Any) -> None:
    runner.compute(step(new=True), 1)
    runner.execute_model_state.hidden_states[1, 2] = torch.nan
    findings = attached_findings(finished_output(runner.sample_tokens(None)))
    assert findings == {"a": Corruption("rows", "NaN or infinity in the rows from position 0 on")}


def test_rows_that_cannot_be_taken_are_told_with_the_next_step_that_is_computed(runner: Any) -> None:
    broken = step(new=True)
    attach_step(broken, StageStep(feeds=(("b", RowsFeed(final_length=5)),)))
    runner.compute(broken, 1)
    state, runner.execute_model_state, runner.empty = runner.execute_model_state, None, True
    assert runner.sample_tokens(None) is EMPTY_MODEL_RUNNER_OUTPUT
    runner.execute_model_state, runner.empty = state, False
    findings = attached_findings(finished_output(runner.sample_tokens(None)))
    assert findings == {"b": Corruption("row_sequence", "0 rows have come of 5")}
    assert attached_findings(EMPTY_MODEL_RUNNER_OUTPUT) == {}
    runner.compute(step(), 2)
    assert attached_findings(finished_output(runner.sample_tokens(None))) == {}


def test_infinity_among_logits_is_counted_like_nan_and_barred_tokens_are_not(runner: Any) -> None:
    """What sampling makes of them, in place, is not: a penalty may make anything infinite."""
    logits = torch.tensor([[0.0, -1.0, -torch.inf], [torch.inf, torch.nan, 2.0]])
    runner._sample(logits, None)
    assert runner._get_nans_in_logits(logits) == {"a": 0, "b": 2}
    runner._sample(None, None)
    assert runner._get_nans_in_logits(None) == {}


def test_rows_belong_to_the_step_whose_tokens_they_come_with(runner: Any) -> None:
    """With async scheduling the next step is computed before the first one's output is asked for."""
    runner.compute(step(new=True), 1)
    first = runner.sample_tokens(None)
    runner.input_batch.num_computed_tokens_cpu = np.array([3, 1])
    runner.query_start_loc.np = np.array([0, 1, 2])
    runner.compute(step(), 2)
    second = runner.sample_tokens(None)
    for output, number, expected in ((first, 1, [[10.0], [11.0], [12.0], [100.0]]), (second, 2, [[20.0]])):
        result = finished_output(output)
        assert result.sampled_token_ids[0] == [number]
        rows = result.pooler_output[0]
        assert result.pooler_output[1] is None
        assert torch.equal(
            _rows(decode_payload(bytes(rows.numpy()))), torch.tensor(expected).expand(-1, WIDTH)
        )


def _rows(payload: RowsPayload) -> torch.Tensor:
    """All rows of the payload, `[n, WIDTH]`."""
    assert isinstance(payload.block, InlineBlock)
    return torch.cat(
        [
            torch.frombuffer(
                bytearray(payload.block.data), dtype=torch.float32, count=s.num_rows * WIDTH, offset=s.offset
            ).view(s.num_rows, WIDTH)
            for s in payload.segments
        ]
    )


def test_a_step_without_wanted_rows_is_left_as_it_is(runner: Any) -> None:
    runner.compute(step(new=True), 1)
    runner.execute_model(step(finished=("a",)))  # "b" wants no rows
    output = runner.sample_tokens(None)
    assert finished_output(output).pooler_output is None
    assert isinstance(output, AsyncModelRunnerOutput) == runner.is_async


def test_nothing_is_held_once_a_request_has_finished(runner: Any) -> None:
    runner.compute(step(new=True), 1)
    assert runner.num_row_requests() == 1
    runner.execute_model(step(finished=("a", "b")))
    assert runner.num_row_requests() == 0


def test_a_stage_without_its_runtime_config_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ar_runner_base, "get_tensor_model_parallel_rank", lambda: 0)
    with pytest.raises(TypeError, match="StageRuntimeConfig"):
        type("Runner", (ARModelRunnerV1Mixin, BaseRunner), {})(
            SimpleNamespace(additional_config={}), torch.device("cpu")
        )
