"""What the runners of both generations refuse and choose when they load a model, and what they count. Their
steps run in tests/integration: test_frames.py, test_v2_runner.py, test_parity.py and test_qwen3_parity.py."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from omni_server.protocol.corruption import Corruption
from omni_server.protocol.rows import RowsFeed
from omni_server.protocol.runtime_config import PredictorSamplingSpec, QueueSpec, StageRuntimeConfig
from stages.runtime import ar_runner_base, ar_runner_v2
from stages.runtime.ar_runner_v1 import ARModelRunnerV1Mixin
from stages.runtime.ar_runner_v2 import ARModelRunnerV2Mixin
from stages.runtime.code_sampling import Choose, CodeSampling
from stages.runtime.fused_sampler import FusedSampler
from stages.runtime.predictor_graphs import PredictorGraphs, Record
from stages.runtime.stage_step import StageStep, attach_step, attached_findings

WIDTH = 32
INLINE = QueueSpec(capacity=1, path=None, slot_bytes=0, max_portions=8, num_consumers=1)
SENDING_LAYER = StageRuntimeConfig(
    model_dir="", row_producer=f"{__name__}:LayerProducer", output_queue=INLINE
)
FED = StageRuntimeConfig(model_dir="", input_queues=(INLINE,))
LOOKING_UP = StageRuntimeConfig(model_dir="", input_queues=(INLINE,), row_table=True)
PREDICTING = StageRuntimeConfig(model_dir="", num_predicted=1)


class LayerProducer:
    """Rows are what comes out of layer 3."""

    hidden_layer = 3

    def __init__(self, model: Any, model_dir: Path) -> None:
        """Nothing of either is needed."""


class Model:
    """Embeds nothing, and returns hidden states of layers that are named, as vLLM's models do for EAGLE 3."""

    supports_eagle3 = True
    has_own_lm_head = has_own_embed_tokens = False
    set_aux_hidden_state_layers = get_eagle3_default_aux_hidden_state_layers = print


class Predicting:
    num_predicted = 1
    code_sampling = CodeSampling(temperature=1.0, top_k=1, top_p=1.0)

    @staticmethod
    def predict(hidden: torch.Tensor, sampled: torch.Tensor, choose: Choose) -> torch.Tensor:
        return choose(hidden, 0)[:, None]

    @staticmethod
    def embed_predicted(codes: torch.Tensor) -> torch.Tensor:
        return codes.float().expand(-1, WIDTH)


class State(DefaultModelState):
    """What vLLM chooses for the model."""

    def __init__(self, *args: Any) -> None:
        self.rope_state = None


class OwnInputs(ModelState):
    def __init__(self, *args: Any) -> None:
        pass

    prepare_inputs_embeds = prepare_inputs = None  # type: ignore[assignment]
    prepare_dummy_inputs = prepare_attn = None  # type: ignore[assignment]


class OwnSampler(State):
    def custom_sampler(self, sampler: Any) -> tuple[Any, None]:
        return sampler, None


class BaseRunner:
    """As much of vLLM's runners as loading a model takes."""

    use_aux_hidden_state_outputs = False
    encoder_cache = execute_model_state = None
    model_class: type = Model
    state_class: type = State
    sampler_class: type = Sampler

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self.vllm_config, self.device = vllm_config, device

    def load_model(self) -> None:
        self.model = self.model_class()
        self.model_state = self.state_class()
        self.sampler: Any = object.__new__(self.sampler_class)

    def get_model(self) -> Any:
        return self.model


def vllm_config(config: Any, *, max_num_seqs: int = 3, prefill_context_parallel_size: int = 1) -> Any:
    return SimpleNamespace(
        additional_config=config,
        parallel_config=SimpleNamespace(prefill_context_parallel_size=prefill_context_parallel_size),
        speculative_config=None,
        model_config=SimpleNamespace(
            is_moe=False, max_model_len=16, dtype=torch.float32, get_hidden_size=lambda: WIDTH
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
    )


MIXINS = pytest.mark.parametrize("mixin", [ARModelRunnerV1Mixin, ARModelRunnerV2Mixin])


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only rank, where no kernel can be compiled."""
    monkeypatch.setattr(ar_runner_base, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(FusedSampler, "in_place_of", lambda sampler, config: ("fused", sampler))


def runner(config: StageRuntimeConfig, mixin: type = ARModelRunnerV2Mixin, **attributes: Any) -> Any:
    made = type("Runner", (mixin, BaseRunner), attributes)(vllm_config(config), torch.device("cpu"))
    made.load_model()
    return made


@MIXINS
def test_a_stage_without_its_runtime_config_is_refused(mixin: type) -> None:
    with pytest.raises(TypeError, match="StageRuntimeConfig"):
        type("Runner", (mixin, BaseRunner), {})(vllm_config({}), torch.device("cpu"))


@MIXINS
def test_a_model_that_does_not_name_its_layers_is_refused(mixin: type) -> None:
    with pytest.raises(TypeError, match="SimpleNamespace does not return the hidden states of a layer"):
        runner(SENDING_LAYER, mixin, model_class=SimpleNamespace)


@MIXINS
def test_drafts_from_hidden_states_are_refused_where_a_layers_are_sent(mixin: type) -> None:
    with pytest.raises(ValueError, match="cannot draft from hidden states"):
        runner(SENDING_LAYER, mixin, use_aux_hidden_state_outputs=True)


@MIXINS
def test_a_model_without_a_table_is_refused_where_text_arrives_as_ids(mixin: type) -> None:
    with pytest.raises(TypeError, match="Model has no table of rows for text ids"):
        runner(LOOKING_UP, mixin)


@MIXINS
def test_a_stage_config_may_set_how_predicted_codes_are_sampled(mixin: type) -> None:
    config = StageRuntimeConfig(
        model_dir="", num_predicted=1, predictor_sampling=PredictorSamplingSpec(temperature=0, top_p=0.5)
    )
    model = runner(config, mixin, model_class=Predicting).get_model()
    assert model.code_sampling == CodeSampling(temperature=0, top_k=1, top_p=0.5)
    assert Predicting.code_sampling == CodeSampling(temperature=1.0, top_k=1, top_p=1.0)


def test_context_parallel_prefill_is_refused() -> None:
    config = vllm_config(FED, prefill_context_parallel_size=2)
    with pytest.raises(ValueError, match="set prefill_context_parallel_size to 1"):
        type("Runner", (ARModelRunnerV2Mixin, BaseRunner), {})(config, torch.device("cpu"))


@pytest.mark.parametrize("state_class", [OwnInputs, OwnSampler])
def test_a_model_that_prepares_inputs_or_samples_otherwise_is_refused(state_class: type) -> None:
    message = f"{state_class.__name__} prepares inputs or samples in a way of its own"
    with pytest.raises(TypeError, match=message):
        runner(FED, state_class=state_class)


def test_a_stage_that_is_fed_samples_in_one_kernel_and_other_samplers_stay() -> None:
    name, replaced = runner(FED).sampler
    assert (name, type(replaced)) == ("fused", Sampler)
    watermarking = type("GPUWatermarkSampler", (Sampler,), {})
    assert type(runner(StageRuntimeConfig(model_dir="")).sampler) is Sampler
    assert type(runner(FED, sampler_class=watermarking).sampler) is watermarking


def test_the_predictor_is_recorded_once_when_vllm_records_its_own_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First to measure their memory, then to keep them. Without graphs it runs step by step."""
    recordings: list[Callable[[], None]] = []

    @contextmanager
    def recorder(device: torch.device) -> Iterator[Record]:
        def record(work: Callable[[], None]) -> Callable[[], None]:
            recordings.append(work)
            return work

        yield record

    monkeypatch.setattr(ar_runner_v2, "cuda_graph_recorder", recorder)
    monkeypatch.setattr(DefaultModelState, "capture_inner_cudagraphs", lambda *args: None)
    made = runner(PREDICTING, model_class=Predicting)
    assert not isinstance(made.code_history.predict_codes, PredictorGraphs)
    for _ in range(2):
        made.model_state.capture_inner_cudagraphs(None, None, [], None)
        assert isinstance(made.code_history.predict_codes, PredictorGraphs)
        assert len(recordings) == 3  # for 3, 2 and 1 tokens
    runner(FED).model_state.capture_inner_cudagraphs(None, None, [], None)
    assert len(recordings) == 3


# -- corrupt data


class SamplingRunner(BaseRunner):
    """Of V1, in a step without an output of its own unless there is one."""

    input_batch = SimpleNamespace(num_reqs=0, generators={})
    discard_request_mask = SimpleNamespace(np=torch.zeros(0).bool().numpy())
    output = EMPTY_MODEL_RUNNER_OUTPUT

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Computes nothing."""

    def sample_tokens(self, grammar_output: None) -> ModelRunnerOutput:
        return self.output

    def _get_nans_in_logits(self, logits: torch.Tensor | None) -> dict[str, int]:
        return {} if logits is None else dict(zip("ab", logits.isnan().sum(1).tolist(), strict=True))

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: None) -> None:
        if logits is not None:
            logits.fill_(torch.inf)


@pytest.fixture
def sampling() -> Any:
    made = type("Runner", (ARModelRunnerV1Mixin, SamplingRunner), {})(vllm_config(FED), torch.device("cpu"))
    made.load_model()
    return made


def test_infinity_among_logits_is_counted_like_nan_and_barred_tokens_are_not(sampling: Any) -> None:
    """What sampling makes of them, in place, is not: a penalty may make anything infinite."""
    logits = torch.tensor([[0.0, -1.0, -torch.inf], [torch.inf, torch.nan, 2.0]])
    sampling._sample(logits, None)
    assert sampling._get_nans_in_logits(logits) == {"a": 0, "b": 2}
    sampling._sample(None, None)
    assert sampling._get_nans_in_logits(None) == {}


def test_rows_that_cannot_be_taken_are_told_with_the_next_step_that_is_computed(sampling: Any) -> None:
    """vLLM has one object for all steps without an output."""
    broken = SchedulerOutput.make_empty()
    attach_step(broken, StageStep(feeds=(("b", RowsFeed(final_length=5)),)))
    sampling.execute_model(broken)
    assert sampling.sample_tokens(None) is EMPTY_MODEL_RUNNER_OUTPUT
    assert attached_findings(EMPTY_MODEL_RUNNER_OUTPUT) == {}
    told = []
    for _ in range(2):
        sampling.output = ModelRunnerOutput(req_ids=["b"], req_id_to_index={"b": 0})
        told.append(attached_findings(sampling.sample_tokens(None)))
    assert told == [{"b": Corruption("row_sequence", "received 0 of 5 rows")}, {}]
