"""The code predictor of Qwen3-Omni as CUDA graphs, in its real size with random weights: codes are those
computed step by step, and those of torch's operations.

Run by hand: `pytest -m gpu tests/gpu/test_code_predictor_graphs.py -s` prints how many differ.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorConfig,
)
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)

from stages.qwen3_omni.talker import CODE_SAMPLING
from stages.qwen_codec.code_predictor import CodePredictor
from stages.qwen_codec.decoder_operations import DecoderOperations
from stages.runtime.code_sampling import Choose, CodeChooser, Draws
from stages.runtime.code_sampling_kernel import CodeKernel
from stages.runtime.cuda_graphs import batch_sizes
from stages.runtime.frame_predictor import predicted_codes
from stages.runtime.predictor_graphs import PredictorGraphs, cuda_graph_recorder

pytestmark = pytest.mark.gpu

MAX_NUM_SEQS, NUM_TOKENS = 64, 3072
COUNTS = [1, 2, 3, 5, 9, 31, 33, 64]
DTYPES = [torch.bfloat16, torch.float32]
DEVICE = torch.device("cuda")


class Talker:
    """The predictor and the embedding of the sampled tokens."""

    code_sampling = CODE_SAMPLING

    def __init__(self, dtype: torch.dtype) -> None:
        config = Qwen3OmniMoeTalkerCodePredictorConfig(
            num_code_groups=16, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
        )
        self.width: int = config.hidden_size
        self.dtype = dtype
        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with DEVICE:
                self._predictor = CodePredictor(config, config.hidden_size, MAX_NUM_SEQS)
                self._embedding = nn.Embedding(NUM_TOKENS, self.width)
        finally:
            torch.set_default_dtype(default)
        for weight in self._predictor.parameters():
            nn.init.normal_(weight, 0.0 if weight.dim() > 1 else 1.0, std=0.02)
        self.num_predicted = self._predictor.num_predicted

    def use_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Instead of the kernels."""
        monkeypatch.setattr(self._predictor, "operations", DecoderOperations(1e-6))

    def predict(self, hidden: torch.Tensor, sampled: torch.Tensor, choose: Choose) -> torch.Tensor:
        codes: torch.Tensor = self._predictor(hidden, self._embedding(sampled), choose)
        return codes

    def embed_predicted(self, codes: torch.Tensor) -> torch.Tensor:
        return self._predictor.embed(codes)


@pytest.fixture(scope="module", autouse=True)
def distributed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's groups of one process, which recording looks at."""
    store: Path = tmp_path_factory.mktemp("distributed") / "store"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{store}", 0)
        ensure_model_parallel_initialized(1, 1)
        yield
    cleanup_dist_env_and_memory()


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def talker(request: pytest.FixtureRequest) -> Talker:
    return Talker(request.param)


@pytest.fixture(scope="module")
def graphs(talker: Talker) -> PredictorGraphs:
    return recorded(talker)


@torch.inference_mode()
def recorded(talker: Talker) -> PredictorGraphs:
    hidden = torch.zeros(MAX_NUM_SEQS, talker.width, dtype=talker.dtype, device=DEVICE)
    with cuda_graph_recorder(DEVICE) as record:
        return PredictorGraphs(talker, hidden, record)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


Batch = tuple[torch.Tensor, torch.Tensor, Draws]


def batch_of(talker: Talker, count: int, seed: int) -> Batch:
    """Greedy and sampled rows, mixed."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 1 << 40, (3, count), generator=generator).to(DEVICE)
    hidden = torch.randn(count, talker.width, generator=generator).to(DEVICE, talker.dtype)
    sampled = torch.randint(0, 2048, (count,), generator=generator).to(DEVICE)
    return hidden, sampled, Draws(numbers[0] % 1000, numbers[1] - (1 << 39), numbers[2] % 2)


def padded(batch: Batch) -> Batch:
    """To the size of a graph, by repeating the first row."""
    hidden, sampled, draws = batch
    size = next(size for size in batch_sizes(MAX_NUM_SEQS) if size >= len(hidden))
    rows = torch.arange(size, device=DEVICE)
    rows[len(hidden) :] = 0
    return hidden[rows], sampled[rows], Draws(*(each[rows] for each in draws))


@pytest.mark.parametrize("count", COUNTS)
def test_codes_are_those_computed_step_by_step(talker: Talker, graphs: PredictorGraphs, count: int) -> None:
    """Exactly those in a batch of the graph's size. In one of its own size, a matrix product may round in
    another way, and two codes may then be equally likely: in float32, of one row in a hundred."""
    num_different = 0
    for seed in range(20):
        graphs(*batch_of(talker, MAX_NUM_SEQS, 100 + seed))  # leaves its rows behind
        batch = batch_of(talker, count, seed)
        codes = graphs(*batch)
        assert torch.equal(codes, predicted_codes(talker, *padded(batch))[:count])
        num_different += int((codes != predicted_codes(talker, *batch)).any(1).sum())
    tell(f"{count} of {talker.dtype}: {num_different} of {20 * count} rows differ without padding")
    if talker.dtype == torch.float32:
        assert num_different <= max(1, 20 * count // 100)


@pytest.mark.parametrize("count", COUNTS)
def test_codes_are_those_of_torchs_operations(
    talker: Talker, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 all codes, but of one row in a hundred, in which two are equally likely but for rounding. In
    bfloat16 the logits of the first code, whose spread is 3, within 0.05."""
    batches = [batch_of(talker, count, seed) for seed in range(20)]
    codes, logits = predictions(talker, batches)
    talker.use_torch(monkeypatch)
    expected_codes, expected_logits = predictions(talker, batches)
    num_different = int((codes != expected_codes).any(1).sum())
    difference = (logits - expected_logits).abs().max().item()
    tell(
        f"{count} of {talker.dtype}: {num_different} of {20 * count} rows and logits by {difference:.2g} differ"
    )
    if talker.dtype == torch.float32:
        assert num_different <= max(1, 20 * count // 100)
    assert difference < (1e-4 if talker.dtype == torch.float32 else 0.05)


def predictions(talker: Talker, batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    """All codes of the batches, sampled, and the logits of the first code of each frame."""
    all_codes, all_logits = [], []
    for hidden, sampled, draws in batches:
        choose = CodeKernel(CODE_SAMPLING, draws)

        def note(logits: torch.Tensor, codebook: int, choose: CodeKernel = choose) -> torch.Tensor:
            if codebook == 0:
                all_logits.append(logits.float())
            return choose(logits, codebook)

        all_codes.append(talker.predict(hidden, sampled, note))
    return torch.cat(all_codes), torch.cat(all_logits)


def test_steps_that_are_launched_ahead_do_not_mix(talker: Talker, graphs: PredictorGraphs) -> None:
    """As with asynchronous scheduling: the host reads no result before it has launched all steps."""
    batches = [batch_of(talker, count, count) for count in COUNTS]
    expected = [predicted_codes(talker, *padded(batch))[: len(batch[0])] for batch in batches]
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    made = [graphs(*batch) for batch in batches]
    assert all(torch.equal(*pair) for pair in zip(made, expected, strict=True))


@pytest.mark.parametrize("count", [1, 8, 64])
def test_the_kernel_chooses_as_torchs_operations_do(count: int) -> None:
    """In float32: the sum of likelier codes may round across top-p, of one row in a thousand."""
    generator = torch.Generator(DEVICE).manual_seed(count)
    num_rows, num_different = 0, 0
    for seed in range(200):
        numbers = torch.randint(0, 1 << 40, (2, count), device=DEVICE, generator=generator)
        draws = Draws(numbers[0] % 1000, numbers[1], torch.arange(count, device=DEVICE) % 4 // 3)
        logits = 4 * torch.randn(count, 2048, device=DEVICE, generator=generator)
        mine, other = (made(CODE_SAMPLING, draws)(logits, seed % 15) for made in (CodeKernel, CodeChooser))
        num_rows += count
        num_different += int((mine != other).sum())
    tell(f"{count} rows: {num_different} of {num_rows} choices differ")
    assert num_different <= max(1, num_rows // 1000)


def tell(line: str) -> None:
    sys.stdout.write(f"\n{line}")
