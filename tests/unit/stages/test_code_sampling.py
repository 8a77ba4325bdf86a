"""How predicted codes are drawn from their logits."""

import pytest
import torch

from stages.runtime import code_sampling
from stages.runtime.code_sampling import CodeChooser, CodeSampling, Draws, gumbel_noise, noise_state

ALL = CodeSampling(temperature=1.0, top_k=100, top_p=1.0)


def chosen(logits: torch.Tensor, sampling: CodeSampling, seeds: list[int], position: int = 5) -> torch.Tensor:
    positions = torch.full((len(seeds),), position)
    draws = Draws(positions, torch.tensor(seeds), torch.zeros_like(positions))
    return CodeChooser(sampling, draws)(logits, 3)


def test_a_greedy_request_is_greedy_beside_one_that_samples() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).expand(2, -1)
    is_greedy = torch.tensor([1, 0])
    positions = torch.zeros(2, dtype=torch.long)
    choices = {
        int(CodeChooser(ALL, Draws(positions, torch.tensor([0, seed]), is_greedy))(logits, 0)[0])
        for seed in range(20)
    }
    assert choices == {int(logits[0].argmax())}


def test_samples_follow_the_distribution() -> None:
    shares = torch.tensor([0.5, 0.25, 0.15, 0.1])
    seeds = list(range(40_000))
    codes = chosen(shares.log().expand(len(seeds), -1), ALL, seeds)
    counted = codes.bincount(minlength=4) / len(seeds)
    torch.testing.assert_close(counted, shares, atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (CodeSampling(1.0, top_k=2, top_p=1.0), {0, 1}),
        (CodeSampling(1.0, top_k=100, top_p=0.5), {0}),
        (CodeSampling(1.0, top_k=100, top_p=0.51), {0, 1}),
        (CodeSampling(1.0, top_k=3, top_p=0.95), {0, 1, 2}),
        (CodeSampling(1e-3, top_k=100, top_p=1.0), {0}),
        (CodeSampling(1.0, top_k=0, top_p=1.0), {0, 1, 2, 3}),
        (CodeSampling(1.0, top_k=0, top_p=0.51), {0, 1}),
    ],
)
def test_unlikely_codes_are_cut_off(sampling: CodeSampling, possible: set[int]) -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    assert set(chosen(logits.expand(500, -1), sampling, list(range(500))).tolist()) == possible


def test_noise_differs_between_seeds_positions_codebooks_and_ids() -> None:
    ids = torch.arange(1000)[None]
    noise = [
        gumbel_noise(noise_state(torch.tensor([seed]), torch.tensor([position])), codebook, ids)[0]
        for seed in (0, 1, 1 << 32)
        for position in (0, 1)
        for codebook in (0, 1)
    ]
    correlated = torch.corrcoef(torch.stack(noise))
    assert correlated.fill_diagonal_(0).abs().max() < 0.15
    assert torch.stack(noise).isfinite().all()


def test_noise_is_finite_whatever_the_random_bits_are(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = torch.tensor([[0, 1, 0xFFFFFE00, 0xFFFFFFFF]])
    monkeypatch.setattr(code_sampling, "_mixed", lambda bits: extremes if bits.dim() == 2 else bits)
    assert gumbel_noise(torch.zeros(1, dtype=torch.long), 0, extremes).isfinite().all()
