"""Updates a runner's inputs from one decode step to the next in one Triton kernel."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from stages.runtime.kernel_launch import CachedLaunch

_COLUMNS = 1024


@dataclass(frozen=True)
class StepTensors:
    """Device tensors that belong to vLLM's V2 runner. S is the number of request states, B the number of
    blocks per request. In tensors without S, a step's requests and tokens are the first entries."""

    num_computed: torch.Tensor  # [S] int32, tokens in the cache
    last_tokens: torch.Tensor  # [S, 1] int64, sampled in the previous step
    block_table: torch.Tensor  # [S, B] int32
    block_size: int
    input_ids: torch.Tensor  # int32
    positions: torch.Tensor  # int64
    lengths: torch.Tensor  # int32, including the step's token
    slots: torch.Tensor  # int64, in the cache
    step_blocks: torch.Tensor  # [*, B] int32
    rope_positions: torch.Tensor  # [3, *] int64
    embedding: torch.Tensor  # [vocabulary, width]
    embeds: torch.Tensor  # [*, width]


@triton.jit
def _advance(
    states_ptr,
    num_computed_ptr,
    last_tokens_ptr,
    rope_delta_ptr,
    block_table_ptr,
    input_ids_ptr,
    positions_ptr,
    lengths_ptr,
    slots_ptr,
    step_blocks_ptr,
    rope_ptr,
    embedding_ptr,
    rows_ptr,
    embeds_ptr,
    block_table_stride,
    step_blocks_stride,
    rope_stride,
    width,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    request = tl.program_id(0)
    state = tl.load(states_ptr + request)
    token = tl.load(last_tokens_ptr + state)
    if tl.program_id(1) == 0:
        position = tl.load(num_computed_ptr + state)
        block = position // BLOCK_SIZE
        number = tl.load(block_table_ptr + state * block_table_stride + block)
        tl.store(step_blocks_ptr + request * step_blocks_stride + block, number)
        tl.store(slots_ptr + request, number.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE)
        tl.store(input_ids_ptr + request, token.to(tl.int32))
        tl.store(positions_ptr + request, position.to(tl.int64))
        tl.store(lengths_ptr + request, position + 1)
        rope = (position + tl.load(rope_delta_ptr + state)).to(tl.int64)
        for axis in tl.static_range(3):
            tl.store(rope_ptr + axis * rope_stride + request, rope)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    embedding = tl.load(embedding_ptr + token * width + column, mask=inside)
    row = tl.load(rows_ptr + request * width + column, mask=inside)
    total = embedding.to(tl.float32) + row.to(embedding.dtype).to(tl.float32)
    tl.store(embeds_ptr + request * width + column, total.to(embedding.dtype), mask=inside)


_launch = CachedLaunch(_advance)


def advance(tensors: StepTensors, states: torch.Tensor, rope_delta: torch.Tensor, rows: torch.Tensor) -> None:
    """Write the inputs of a step that computes the next token of each request of the previous step.

    `states` `[n]` (int64): the requests' states. `rope_delta` `[S]` (int64): M-RoPE position minus index.
    `rows` `[n, width]`: added to the token embeddings, in their dtype. Existing entries of `step_blocks` are
    kept.
    """
    width = tensors.embedding.shape[1]
    _launch(
        (len(states), -(-width // _COLUMNS), 1),
        states,
        tensors.num_computed,
        tensors.last_tokens,
        rope_delta,
        tensors.block_table,
        tensors.input_ids,
        tensors.positions,
        tensors.lengths,
        tensors.slots,
        tensors.step_blocks,
        tensors.rope_positions,
        tensors.embedding,
        rows,
        tensors.embeds,
        tensors.block_table.stride(0),
        tensors.step_blocks.stride(0),
        tensors.rope_positions.stride(0),
        width,
        tensors.block_size,
        _COLUMNS,
    )
