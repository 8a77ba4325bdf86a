"""The V2 adapter adds rows to a step's output and takes nothing away. The base is a stand-in for vLLM's V2
runner with the attributes and methods that the adapter relies on; the real one runs in
tests/integration/test_v2_runner.py."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from omni_server.protocol.rows import (
    REQUEST_KEY,
    InlineBlock,
    RowsFeed,
    RowsInput,
    RowsOutput,
    RowsPayload,
    Segment,
    decode_payload,
    encode,
)
from omni_server.protocol.runtime_config import PredictorSamplingSpec, StageRuntimeConfig
from stages.runtime import ar_runner_base, ar_runner_v2
from stages.runtime.ar_runner_v2 import ARModelRunnerV2Mixin
from stages.runtime.code_sampling import Choose, CodeSampling
from stages.runtime.fractional_positions import unpacked
from stages.runtime.fused_sampler import FusedSampler
from stages.runtime.predictor_graphs import PredictorGraphs, Record
from stages.runtime.stage_step import StageStep, attach_step
from tests.unit.stages.runners import INLINE, SENDING, WIDTH, AsyncOutput, embedded

FED = StageRuntimeConfig(model_dir="", input_queues=(INLINE,))


class Model:
    """Embeds id i as a row of i; its M-RoPE positions start at 1000."""

    embed_input_ids = staticmethod(embedded)

    @staticmethod
    def get_mrope_input_positions(tokens: list[int], features: list[Any]) -> tuple[torch.Tensor, int]:
        return 1000 + torch.arange(len(tokens)).expand(3, -1), 1000


class Rope:
    """vLLM's positions of all requests: staged first, then written."""

    max_num_reqs, num_dims, max_model_len = 4, 3, 8
    prefill_delta: Any

    def __init__(self) -> None:
        self.positions: dict[int, list[int]] = {}
        self.staged: dict[int, list[int]] = {}

    def apply(self) -> None:
        self.positions |= self.staged
        self.staged = {}
        self.written_delta = self.prefill_delta.np.copy()

    def update_prefill_positions(self, req_index: int, positions: torch.Tensor, delta: int) -> None:
        assert req_index not in self.staged
        self.positions[req_index] = positions[0].tolist()


class State(DefaultModelState):
    """What vLLM chooses for the model."""

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: None, device: torch.device) -> None:
        self.model, self.device = model, device
        self.rope_state = Rope()
        self.inputs_embeds = torch.zeros(16, WIDTH)

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        positions, delta = self.model.get_mrope_input_positions(new_req_data.prefill_token_ids, [])
        self.rope_state.staged[req_index] = positions[0].tolist()
        self.rope_state.prefill_delta.np[req_index] = delta

    def apply_staged_writes(self) -> None:
        self.rope_state.apply()

    def prepare_inputs_embeds(self, encoder_inputs: Any, input_batch: Any, req_states: None) -> torch.Tensor:
        ids = input_batch.input_ids[: input_batch.num_tokens]
        self.inputs_embeds[: len(ids)] = self.model.embed_input_ids(ids)
        return self.inputs_embeds[: input_batch.num_tokens + 2]  # padded for CUDA graphs


class BaseRunner:
    """Computes hidden states of 10, 20 and so on, one value for each step."""

    state_class: type = State
    uses_inputs_embeds = True
    sampler_class: type = Sampler
    model_class: type = Model

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self.vllm_config, self.device = vllm_config, device
        self.encoder_cache = None
        self.execute_model_state: Any = None
        self.params: dict[str, SamplingParams] = {}
        self.num_steps = 0

    def load_model(self) -> None:
        self.model = self.model_class()
        self.model_state = self.state_class(self.vllm_config, self.model, None, self.device)
        self.sampler: Any = object.__new__(self.sampler_class)

    def get_model(self) -> Any:
        return self.model

    def finish_requests(self, scheduler_output: SchedulerOutput) -> None:
        for request_id in scheduler_output.finished_req_ids:
            self.params.pop(request_id, None)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        for index, request in enumerate(scheduler_output.scheduled_new_reqs):
            self.params[request.req_id] = request.sampling_params
            self.model_state.add_request(index, request)
        self.model_state.apply_staged_writes()

    def execute_model(self, scheduler_output: SchedulerOutput, batch: Any = None) -> None:
        self.finish_requests(scheduler_output)
        self.add_requests(scheduler_output)
        if batch is None:
            return
        self.num_steps += 1
        if self.uses_inputs_embeds:
            embeds = self.model_state.prepare_inputs_embeds({}, batch, None)
            self.model_input = embeds.clone()
            embeds.fill_(torch.nan)  # the model may use its input as scratch memory
        hidden = torch.full((batch.num_tokens + 2, WIDTH), 10.0 * self.num_steps)
        self.execute_model_state = SimpleNamespace(input_batch=batch, hidden_states=hidden)

    def sample_tokens(self, grammar_output: None) -> AsyncOutput:
        ids = self.execute_model_state.input_batch.req_ids
        self.execute_model_state = None
        self.output = AsyncOutput(
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=[[self.num_steps] for _ in ids],
                num_nans_in_logits=dict.fromkeys(ids, 7),
            )
        )
        return self.output


def runner(config: StageRuntimeConfig, monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> Any:
    monkeypatch.setattr(ar_runner_base, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    monkeypatch.setattr(FusedSampler, "in_place_of", lambda sampler, config: ("fused", sampler))
    made = type("Runner", (ARModelRunnerV2Mixin, BaseRunner), attributes)(
        vllm_config(config), torch.device("cpu")
    )
    made.load_model()
    return made


def vllm_config(config: StageRuntimeConfig, prefill_context_parallel_size: int = 1) -> Any:
    parallel = SimpleNamespace(prefill_context_parallel_size=prefill_context_parallel_size)
    return SimpleNamespace(
        additional_config=config,
        parallel_config=parallel,
        speculative_config=None,
        model_config=SimpleNamespace(
            uses_mrope=True, max_model_len=16, dtype=torch.float64, get_hidden_size=lambda: WIDTH
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=3),
    )


def request(request_id: str, token_ids: list[int], said: Any = None, prompt_length: int | None = None) -> Any:
    return NewRequestData(
        req_id=request_id,
        prompt_token_ids=token_ids[:prompt_length],
        mm_features=[],
        sampling_params=SamplingParams(extra_args=None if said is None else {REQUEST_KEY: encode(said)}),
        pooling_params=None,
        block_ids=([],),
        num_computed_tokens=0,
        lora_request=None,
        prefill_token_ids=token_ids,
    )


def step(
    new: tuple[Any, ...] = (), finished: tuple[str, ...] = (), preempted: tuple[str, ...] = ()
) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = list(new)
    output.finished_req_ids = set(finished)
    output.preempted_req_ids = set(preempted)
    return output


def batch(**tokens: tuple[int, list[int]]) -> Any:
    """Request id -> first position and ids of the step, in the order of the batch."""
    lengths = np.array([len(ids) for _, ids in tokens.values()], np.int32)
    return SimpleNamespace(
        req_ids=list(tokens),
        num_reqs=len(tokens),
        num_tokens=int(lengths.sum()),
        num_computed_tokens_np=np.array([first for first, _ in tokens.values()], np.int32),
        num_scheduled_tokens=lengths,
        # Padded to four requests.
        query_start_loc_np=np.concatenate([[0], np.cumsum(lengths), [lengths.sum()] * 3]).astype(np.int32),
        input_ids=torch.tensor([i for _, ids in tokens.values() for i in ids] + [99, 99]),
    )


def rows(message: torch.Tensor) -> list[float]:
    """First number of each row of the message."""
    payload = decode_payload(bytes(message.numpy()))
    assert isinstance(payload.block, InlineBlock)
    return [
        float(np.frombuffer(payload.block.data, np.float32, 1, segment.offset + row * WIDTH * 4)[0])
        for segment in payload.segments
        for row in range(segment.num_rows)
    ]


SENDER = RowsOutput(voice="v")


@pytest.mark.parametrize("uses_inputs_embeds", [True, False])
def test_rows_are_of_the_input_before_the_forward_pass_in_the_order_of_the_batch(
    monkeypatch: pytest.MonkeyPatch, uses_inputs_embeds: bool
) -> None:
    made = runner(SENDING, monkeypatch, uses_inputs_embeds=uses_inputs_embeds)
    both = step(new=(request("sends", [1, 2, 3], SENDER), request("text", [4])))
    made.execute_model(both, batch(text=(0, [4]), sends=(0, [1, 2, 3])))
    output = made.sample_tokens(None).get_output()
    assert output.pooler_output[0] is None
    assert rows(output.pooler_output[1])[:3] == [11.0, 12.0, 13.0]
    assert output.sampled_token_ids == [[1], [1]]
    assert output.num_nans_in_logits == {"text": 7, "sends": 7}


def test_rows_belong_to_the_step_whose_tokens_they_come_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """With async scheduling the next step is computed before the first one's output is asked for."""
    made = runner(SENDING, monkeypatch)
    made.execute_model(step(new=(request("a", [1, 2], SENDER),)), batch(a=(0, [1, 2])))
    first = made.sample_tokens(None)
    made.execute_model(step(), batch(a=(2, [5])))
    second = made.sample_tokens(None)
    assert rows(first.get_output().pooler_output[0])[:2] == [11.0, 12.0]
    assert rows(second.get_output().pooler_output[0]) == [25.0]
    assert second.get_output().sampled_token_ids == [[2]]


def test_a_step_of_text_only_requests_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner(SENDING, monkeypatch)
    made.execute_model(step(new=(request("a", [1], SENDER), request("text", [4]))), batch(text=(0, [4])))
    assert made.sample_tokens(None) is made.output
    assert made.output.get_output().pooler_output is None


def test_a_resumed_request_does_not_send_again_what_it_has_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM frees a preempted request's state and announces it anew, with its output behind the prompt."""
    made = runner(SENDING, monkeypatch)
    made.execute_model(step(new=(request("a", [1, 2], SENDER),)), batch(a=(0, [1, 2])))
    made.sample_tokens(None)
    made.execute_model(step(preempted=("a",)))
    resumed = request("a", [1, 2, 6], SENDER, prompt_length=2)
    made.execute_model(step(new=(resumed,)), batch(a=(0, [1, 2, 6])))
    assert rows(made.sample_tokens(None).get_output().pooler_output[0]) == [26.0]
    assert made.num_resumed == 1
    made.execute_model(step(finished=("a",)))
    assert made.num_row_requests() == 0


def test_prompt_positions_leave_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner(SENDING, monkeypatch)
    made.execute_model(step(new=(request("a", [1, 2], SENDER),)), batch(a=(0, [1, 2])))
    payload = decode_payload(bytes(made.sample_tokens(None).get_output().pooler_output[0].numpy()))
    assert isinstance(payload.block, InlineBlock)
    assert payload.positions_offset is not None
    assert payload.num_positions == 3
    positions = np.frombuffer(payload.block.data, np.float32, 9, payload.positions_offset)
    assert positions.reshape(3, 3).tolist() == [[1000, 1001, 1002]] * 3


def fed_step(request_id: str, *new: Any) -> SchedulerOutput:
    """Three rows of 0.5 with the positions 7, 8 and 9, and 9.5 of what follows."""
    positions = np.tile(np.array([7, 8, 9, 9.5], np.float32), 3)
    data = np.full((3, WIDTH), 0.5, np.float32).tobytes() + positions.tobytes()
    payload = RowsPayload(
        prompt_length=3,
        num_generated_rows=0,
        width=WIDTH,
        dtype="float32",
        block=InlineBlock(data),
        segments=(Segment(0, 3, 0),),
        positions_offset=3 * WIDTH * 4,
        num_positions=4,
    )
    output = step(new)
    attach_step(output, StageStep(feeds=((request_id, RowsFeed(payload)),)))
    return output


def test_rows_are_laid_over_the_buffer_that_the_model_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner(FED, monkeypatch)
    new = request("fed", [1, 2, 3], RowsInput(num_replaced=2)), request("_warmup_0_", [4])
    made.execute_model(fed_step("fed", *new), batch(_warmup_0_=(0, [4]), fed=(0, [1, 2, 3])))
    assert made.model_input[:4, 0].tolist() == [4.0, 0.5, 0.5, 3.5]
    assert made.sample_tokens(None) is made.output


def test_positions_that_came_with_rows_take_the_place_of_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner(FED, monkeypatch)
    fed = request("fed", [1, 2, 3, 4, 5], RowsInput(num_replaced=3))
    made.execute_model(fed_step("fed", fed, request("b", [1])))
    rope = made.model_state.rope_state
    assert unpacked(torch.tensor(rope.positions[0])).tolist() == [7, 8, 9, 9.5, 10.5]
    assert rope.positions[1] == [1000]
    assert unpacked(torch.tensor([rope.written_delta[0] + 5])) == 11.5
    assert rope.written_delta[1] == 1000


def test_context_parallel_prefill_is_refused() -> None:
    with pytest.raises(ValueError, match="set prefill_context_parallel_size to 1"):
        type("Runner", (ARModelRunnerV2Mixin, BaseRunner), {})(vllm_config(SENDING, 2), torch.device("cpu"))


class OwnInputs(ModelState):
    def __init__(self, *args: Any) -> None:
        pass

    prepare_inputs_embeds = prepare_inputs = None  # type: ignore[assignment]
    prepare_dummy_inputs = prepare_attn = None  # type: ignore[assignment]


class OwnSampler(State):
    def custom_sampler(self, sampler: Any) -> tuple[Any, None]:
        return sampler, None


@pytest.mark.parametrize("state_class", [OwnInputs, OwnSampler])
def test_a_model_that_prepares_inputs_or_samples_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch, state_class: type
) -> None:
    with pytest.raises(
        TypeError, match=f"{state_class.__name__} prepares inputs or samples in a way of its own"
    ):
        runner(FED, monkeypatch, state_class=state_class)


def test_a_stage_that_is_fed_samples_in_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    name, replaced = runner(FED, monkeypatch).sampler
    assert (name, type(replaced)) == ("fused", Sampler)


def test_other_samplers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    watermarking = type("GPUWatermarkSampler", (Sampler,), {})
    assert type(runner(SENDING, monkeypatch).sampler) is Sampler
    assert type(runner(FED, monkeypatch, sampler_class=watermarking).sampler) is watermarking


# -- predicted codes


class Predicting(Model):
    num_predicted = 1
    code_sampling = CodeSampling(temperature=1.0, top_k=1, top_p=1.0)

    @staticmethod
    def predict(hidden: torch.Tensor, sampled: torch.Tensor, choose: Choose) -> torch.Tensor:
        assert hidden.dtype == torch.float64
        return choose(hidden, 0)[:, None]

    @staticmethod
    def embed_predicted(codes: torch.Tensor) -> torch.Tensor:
        return codes.float().expand(-1, WIDTH)


PREDICTING = StageRuntimeConfig(model_dir="", num_predicted=1)


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    made: list[Callable[[], None]] = []

    @contextmanager
    def recorder(device: torch.device) -> Iterator[Record]:
        def record(work: Callable[[], None]) -> Callable[[], None]:
            made.append(work)
            return work

        yield record

    monkeypatch.setattr(ar_runner_v2, "cuda_graph_recorder", recorder)
    return made


def test_the_predictor_is_recorded_once_when_vllm_records_its_own_graphs(
    monkeypatch: pytest.MonkeyPatch, recordings: list[Callable[[], None]]
) -> None:
    """First to measure their memory, then to keep them."""
    made = runner(PREDICTING, monkeypatch, model_class=Predicting)
    for _ in range(2):
        made.model_state.capture_inner_cudagraphs(None, None, [], None)
        assert isinstance(made.code_history.predict_codes, PredictorGraphs)
        assert len(recordings) == 3  # for 3, 2 and 1 tokens


def test_a_stage_config_may_set_how_predicted_codes_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    config = StageRuntimeConfig(
        model_dir="", num_predicted=1, predictor_sampling=PredictorSamplingSpec(temperature=0, top_p=0.5)
    )
    model = runner(config, monkeypatch, model_class=Predicting).get_model()
    assert model.code_sampling == CodeSampling(temperature=0, top_k=1, top_p=0.5)
    assert Predicting.code_sampling == CodeSampling(temperature=1.0, top_k=1, top_p=1.0)


def test_without_graphs_the_predictor_runs_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner(PREDICTING, monkeypatch, model_class=Predicting)
    assert not isinstance(made.code_history.predict_codes, PredictorGraphs)


def test_a_stage_that_predicts_nothing_records_nothing(
    monkeypatch: pytest.MonkeyPatch, recordings: list[Callable[[], None]]
) -> None:
    runner(FED, monkeypatch).model_state.capture_inner_cudagraphs(None, None, [], None)
    assert recordings == []
