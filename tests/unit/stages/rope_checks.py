"""Run by test_kernels.py in Triton's interpreter."""

import pytest
import torch

from stages.runtime.attention_kernels import RopeInPlace
from tests.unit.stages.attention_step import Sizes, Step

SIZES = Sizes(6, 2, 32, (4, 6, 6))


def test_queries_and_keys_are_turned_in_place_and_values_stay() -> None:
    step = Step(SIZES, [5] * 9)
    expected = step.turned_qkv()
    RopeInPlace(SIZES.heads + SIZES.kv_heads, SIZES.dim, SIZES.sections)(
        step.qkv, step.positions, step.cos_sin
    )
    torch.testing.assert_close(step.qkv.double(), expected, atol=2e-6, rtol=2e-6)


def test_rows_may_be_parts_of_longer_ones() -> None:
    step = Step(SIZES, [5] * 3)
    expected = step.turned_qkv()
    whole = torch.full((3, step.qkv.shape[1] + 7), 5.0)
    part = whole[:, :-7]
    part.copy_(step.qkv)
    RopeInPlace(SIZES.heads + SIZES.kv_heads, SIZES.dim, SIZES.sections)(part, step.positions, step.cos_sin)
    torch.testing.assert_close(part.double(), expected, atol=2e-6, rtol=2e-6)
    assert (whole[:, -7:] == 5).all()


@pytest.mark.parametrize(("dim", "sections"), [(48, (8, 8, 8)), (32, (4, 6, 5))])
def test_shapes_that_it_cannot_do_are_refused(dim: int, sections: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="no kernel"):
        RopeInPlace(8, dim, sections)
