"""M-RoPE positions with fractions, as vLLM's integers."""

import pytest
import torch

from stages.runtime.fractional_positions import packed, unpacked, with_delta


def test_every_float32_position_comes_back_exactly() -> None:
    generator = torch.Generator().manual_seed(1)
    positions = torch.rand(3, 1000, generator=generator) * 2.0 ** torch.randint(
        0, 17, (3, 1000), generator=generator
    )
    positions = torch.where(positions < 0.5, positions.round(), positions)
    assert torch.equal(unpacked(packed(positions)), positions)


def test_whole_positions_are_as_vllm_has_them() -> None:
    positions = torch.tensor([0.0, 1.0, 17.0, 262_143.0])
    assert packed(positions).tolist() == [0, 1, 17, 262_143]
    assert with_delta(torch.tensor([[0.0, 1.0, 1.0]] * 3))[1] == -1


@pytest.mark.parametrize("largest", [0.75, 20.333, 30_000.667])
def test_the_delta_leads_from_an_index_to_a_position(largest: float) -> None:
    """Also if it is negative: media may have far more tokens than positions."""
    positions = torch.full((3, 2000), largest)
    _, delta = with_delta(positions)
    expected = torch.arange(1, 101) + positions[0, -1]
    assert expected.dtype == torch.float32
    assert torch.equal(unpacked(torch.arange(2000, 2100) + delta), expected)
