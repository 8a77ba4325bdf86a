"""Run by test_kernels.py in Triton's interpreter."""

import pytest
import torch

from stages.runtime.code_sampling import CodeChooser, CodeSampling, Draws
from stages.runtime.code_sampling_kernel import CodeKernel

QWEN3 = CodeSampling(temperature=1.0, top_k=50, top_p=0.8)
QWEN3_TTS = CodeSampling(temperature=0.9, top_k=50, top_p=1.0)
NUM_ROWS = 12


def draws(seed: int, num_rows: int = NUM_ROWS, *, is_greedy: bool | None = None) -> Draws:
    """Mixed unless `is_greedy` is given."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-(1 << 62), 1 << 62, (3, num_rows), generator=generator)
    greedily = numbers[2] % 2 if is_greedy is None else torch.full((num_rows,), int(is_greedy))
    return Draws(numbers[0] % 40_000, numbers[1], greedily)


def random_logits(vocabulary: int, seed: int, scale: float = 4.0) -> torch.Tensor:
    """Without equal ones in a row."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.stack([torch.randperm(vocabulary, generator=generator) for _ in range(NUM_ROWS)])
    return scale * torch.special.ndtri((ranks + 0.5) / vocabulary).float()


@pytest.mark.parametrize(
    ("vocabulary", "sampling"),
    [
        (2048, QWEN3),
        (2048, QWEN3_TTS),
        (2048, CodeSampling(0.7, top_k=128, top_p=0.95)),
        (2048, CodeSampling(1.0, top_k=1, top_p=1.0)),
        (60, CodeSampling(1.3, top_k=20, top_p=1.0)),
        (26, CodeSampling(1.0, top_k=100, top_p=0.5)),
        (5000, QWEN3),
    ],
)
def test_codes_are_those_of_torchs_operations(vocabulary: int, sampling: CodeSampling) -> None:
    for codebook, scale in ((0, 0.3), (1, 1.0), (14, 4.0)):
        logits, how = random_logits(vocabulary, codebook, scale), draws(codebook)
        mine, other = CodeKernel(sampling, how), CodeChooser(sampling, how)
        assert mine(logits, codebook).tolist() == other(logits, codebook).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_may_be_of_a_smaller_type(dtype: torch.dtype) -> None:
    logits, how = random_logits(200, 0).to(dtype), draws(0)
    expected = CodeKernel(QWEN3, how)(logits.float(), 3)
    assert CodeKernel(QWEN3, how)(logits, 3).tolist() == expected.tolist()


def test_logits_may_be_a_part_of_a_wider_tensor() -> None:
    wide, how = random_logits(300, 0), draws(0)
    expected = CodeChooser(QWEN3, how)(wide[:, 10:210], 3)
    assert CodeKernel(QWEN3, how)(wide[:, 10:210], 3).tolist() == expected.tolist()


def test_of_equal_logits_the_smallest_ids_stay() -> None:
    logits = torch.zeros(NUM_ROWS, 300)
    sampling = CodeSampling(1.0, top_k=8, top_p=0.5)  # four of eight
    codes = {
        code
        for seed in range(4)
        for code in CodeKernel(sampling, draws(seed, is_greedy=False))(logits, 0).tolist()
    }
    assert codes == {0, 1, 2, 3}
    assert CodeKernel(sampling, draws(0, is_greedy=True))(logits, 0).tolist() == [0] * NUM_ROWS


@pytest.mark.parametrize("is_greedy", [False, True])
def test_a_code_is_valid_whatever_the_logits_are(is_greedy: bool) -> None:
    logits = random_logits(300, 0)
    logits[0] = torch.nan
    logits[1] = -torch.inf
    logits[2, 7:9] = torch.nan
    logits[3, 7] = torch.inf
    logits[4, 1:] = -torch.inf
    how = draws(0, is_greedy=is_greedy)
    mine, other = CodeKernel(QWEN3, how), CodeChooser(QWEN3, how)
    codes = mine(logits, 0)
    assert ((codes >= 0) & (codes < 300)).all()
    assert not torch.isin(codes[2], torch.tensor([7, 8]))
    assert codes[4] == 0
    assert codes[5:].tolist() == other(logits, 0)[5:].tolist()
    for chooser in (mine, other):
        chooser(random_logits(300, 1), 1)
        assert chooser.is_broken.tolist() == [True, False, True, True, *[False] * (NUM_ROWS - 4)]
