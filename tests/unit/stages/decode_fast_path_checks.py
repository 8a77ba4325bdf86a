"""Run by test_kernels.py in Triton's interpreter."""

from dataclasses import fields

import pytest
import torch

from stages.runtime.decode_fast_path_kernel import StepTensors, advance

PLACES, BLOCK, NUM_BLOCKS, TOKENS, VOCABULARY = 6, 4, 5, 9, 30
STATES = torch.tensor([4, 0, 5])
NUM_COMPUTED = [
    7,
    99,
    99,
    99,
    0,
    8,
]  # by place; those of the step: the first of all, the last and the first of a block


def tensors(width: int, dtype: torch.dtype) -> StepTensors:
    generator = torch.Generator().manual_seed(width)
    return StepTensors(
        num_computed=torch.tensor(NUM_COMPUTED, dtype=torch.int32),
        last_tokens=torch.randint(0, VOCABULARY, (PLACES, 1), generator=generator),
        block_table=torch.randperm(PLACES * NUM_BLOCKS, generator=generator).reshape(PLACES, NUM_BLOCKS).int()
        + 1,
        block_size=BLOCK,
        input_ids=torch.full((TOKENS,), -7, dtype=torch.int32),
        positions=torch.full((TOKENS,), -7),
        lengths=torch.full((PLACES,), -7, dtype=torch.int32),
        slots=torch.full((TOKENS,), -7),
        step_blocks=torch.full((PLACES, NUM_BLOCKS), -7, dtype=torch.int32),
        rope_positions=torch.full((3, TOKENS + 1), -7),
        embedding=torch.randn(VOCABULARY, width, generator=generator).to(dtype),
        embeds=torch.full((TOKENS, width), -7.0, dtype=dtype),
    )


@pytest.mark.parametrize("width", [8, 1024, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_step_is_that_of_the_next_token_and_nothing_else_is_written(width: int, dtype: torch.dtype) -> None:
    """Not in bfloat16, which the interpreter cuts off where GPUs and PyTorch round."""
    step, before = tensors(width, dtype), tensors(width, dtype)
    rows = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    deltas = torch.tensor([100, 0, 0, 0, -2, 300], dtype=torch.int32)
    advance(step, STATES, deltas, rows)

    tokens = before.last_tokens[STATES, 0]
    at = before.num_computed[STATES].long()
    blocks = before.block_table[STATES, at // BLOCK]
    before.input_ids[:3] = tokens.int()
    before.positions[:3] = at
    before.lengths[:3] = at.int() + 1
    before.slots[:3] = blocks.long() * BLOCK + at % BLOCK
    before.step_blocks[torch.arange(3), at // BLOCK] = blocks
    before.rope_positions[:, :3] = at + deltas[STATES]
    before.embeds[:3] = before.embedding[tokens] + rows
    for field in fields(StepTensors):
        ours, wanted = getattr(step, field.name), getattr(before, field.name)
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(wanted)), field.name
