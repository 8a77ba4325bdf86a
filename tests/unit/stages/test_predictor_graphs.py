"""Codes from recorded work are those computed step by step, in batches of every size.

The recorder here traces the work once and runs the same operations on the same tensors again, as a CUDA graph
does: what Python decided while it was recorded stays decided, and nothing can be read by the host.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorConfig,
)

from stages.qwen_codec.code_predictor import CodePredictor
from stages.runtime.code_sampling import Choose, CodeSampling, Draws
from stages.runtime.frame_predictor import predicted_codes
from stages.runtime.predictor_graphs import PredictorGraphs

WIDTH, VOCABULARY, NUM_PREDICTED, MAX_NUM_SEQS = 32, 60, 4, 9
NUM_TOKENS = 20
"""Of the codebook that is sampled."""


class Talker:
    """A code predictor and the embedding of the sampled tokens."""

    num_predicted = NUM_PREDICTED
    code_sampling = CodeSampling(temperature=1.0, top_k=20, top_p=0.9)

    def __init__(self, max_num_seqs: int = MAX_NUM_SEQS) -> None:
        torch.manual_seed(0)
        config = Qwen3OmniMoeTalkerCodePredictorConfig(
            num_code_groups=NUM_PREDICTED + 1,
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        )
        self.predictor = CodePredictor(config, WIDTH, max_num_seqs)
        self._embedding = nn.Embedding(NUM_TOKENS, WIDTH)
        for weight in self.predictor.parameters():
            torch.nn.init.normal_(weight, std=0.3 if weight.dim() > 1 else 1.0)

    def predict(self, hidden: torch.Tensor, sampled: torch.Tensor, choose: Choose) -> torch.Tensor:
        codes: torch.Tensor = self.predictor(hidden, self._embedding(sampled), choose)
        return codes

    def embed_predicted(self, codes: torch.Tensor) -> torch.Tensor:
        return self.predictor.embed(codes)


class Recorder:
    """Traces work. `num_replays` counts by the batch size of the work, in the order of recording."""

    def __init__(self) -> None:
        self.num_replays: list[int] = []

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        recorded, index = make_fx(work)(), len(self.num_replays)
        self.num_replays.append(0)

        def replay() -> None:
            self.num_replays[index] += 1
            recorded()

        return replay


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """As vLLM runs a step."""
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def talker() -> Talker:
    return Talker()


@pytest.fixture(scope="module")
def graphs(talker: Talker) -> PredictorGraphs:
    with torch.inference_mode():
        return PredictorGraphs(talker, torch.zeros(MAX_NUM_SEQS, WIDTH), Recorder())


def batch_of(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, Draws]:
    """Greedy and sampled rows, mixed."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 1 << 40, (3, count), generator=generator)
    return (
        torch.randn(count, WIDTH, generator=generator),
        torch.randint(0, NUM_TOKENS, (count,), generator=generator, dtype=torch.int32),
        Draws(numbers[0] % 1000, numbers[1] - (1 << 39), numbers[2] % 2),
    )


@pytest.mark.parametrize("count", range(1, MAX_NUM_SEQS + 1))
def test_codes_are_those_computed_step_by_step_whatever_ran_before(
    talker: Talker, graphs: PredictorGraphs, count: int
) -> None:
    """In padded batches, too, behind which rows of other batches are left."""
    for seed, before in enumerate((MAX_NUM_SEQS, 1, count)):
        graphs(*batch_of(before, 100 + seed))
        step = batch_of(count, seed)
        codes = graphs(*step)
        assert codes.dtype == torch.int16
        assert torch.equal(codes, predicted_codes(talker, *step))


def test_rows_left_behind_by_a_broken_request_do_not_spread(talker: Talker, graphs: PredictorGraphs) -> None:
    hidden, sampled, draws = batch_of(4, 0)
    graphs(torch.full_like(hidden, torch.nan), sampled, draws)
    step = batch_of(3, 1)
    assert torch.equal(graphs(*step), predicted_codes(talker, *step))


def test_codes_stay_as_they_are_when_the_next_ones_are_predicted(graphs: PredictorGraphs) -> None:
    codes = graphs(*batch_of(3, 0))
    before = codes.clone()
    assert not torch.equal(graphs(*batch_of(3, 1)), before)
    assert torch.equal(codes, before)


def test_a_batch_runs_the_smallest_graph_that_has_room_for_it(talker: Talker) -> None:
    recorder = Recorder()
    graphs = PredictorGraphs(talker, torch.zeros(MAX_NUM_SEQS, WIDTH), recorder)
    for count in range(1, MAX_NUM_SEQS + 1):
        graphs(*batch_of(count, 0))
    assert recorder.num_replays == [1, 4, 2, 1, 1]  # of 9, 8, 4, 2 and 1
