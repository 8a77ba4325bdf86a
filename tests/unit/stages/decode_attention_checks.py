"""Run by test_kernels.py in Triton's interpreter."""

import pytest
import torch

from stages.runtime.attention_kernels import DecodeAttention, RopeInPlace
from tests.unit.stages.attention_step import Sizes, Step

SIZES = Sizes(6, 2, 32, (4, 6, 6))


@pytest.fixture
def attention() -> DecodeAttention:
    return SIZES.kernel("cpu")


def check(step: Step, attention: DecodeAttention) -> None:
    out, cache = step.expected()
    step.run(attention)
    torch.testing.assert_close(step.out.double(), out, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(step.cache.double(), cache, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("lengths", "heads_first"),
    [
        ([1], False),  # nothing before it
        ([2, 16, 17, 128, 129, 130], True),  # ends of blocks and tiles
        ([3000, 40], False),  # several tiles for each of the programs, beside one that is short
        ([0, 20, 0], True),  # padding
        ([5 + 2 * k for k in range(20)], True),  # many requests share out fewer programs
    ],
    ids=str,
)
def test_out_and_cache_are_those_of_attention_after_the_rotary_embedding(
    attention: DecodeAttention, lengths: list[int], heads_first: bool
) -> None:
    """Twice: the scratch memory is left as it was found."""
    for _ in range(2):
        check(Step(SIZES, lengths, heads_first=heads_first), attention)


def test_a_token_without_a_slot_leaves_the_cache_alone(attention: DecodeAttention) -> None:
    step = Step(SIZES, [30, 30])
    step.slots[1] = -1
    check(step, attention)


def test_queries_and_keys_of_a_prompt_are_turned_in_place_and_values_stay() -> None:
    """Rows may be parts of longer ones."""
    step = Step(SIZES, [5] * 9)
    expected = step.turned_qkv()
    whole = torch.full((9, step.qkv.shape[1] + 7), 5.0)
    part = whole[:, :-7]
    part.copy_(step.qkv)
    RopeInPlace(SIZES.heads + SIZES.kv_heads, SIZES.dim, SIZES.sections)(part, step.positions, step.cos_sin)
    torch.testing.assert_close(part.double(), expected, atol=2e-6, rtol=2e-6)
    assert (whole[:, -7:] == 5).all()
