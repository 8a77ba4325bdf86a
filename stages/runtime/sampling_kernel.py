"""The sampling step of vLLM's V2 runner in one Triton kernel: from logits to tokens, one program per request.

vLLM uses about a dozen kernels, whose launches cost a small model's step more than the work they do. The
order of operations, the arithmetic and the noise match vLLM's, so the tokens do too: allowed ids, biases and
barred ids (`LogitBiasState`), penalties (`PenaltiesState`), temperature, top-k, top-p, Gumbel noise (vLLM's
own device function).

The candidates of top-k are gathered first (`top_k_kernel`). The kernel compares all pairs of them, which
yields ranks and the probability above each value without a sort.

Differences from vLLM: if all finite logits of a row are equal, vLLM's search finds no cutoff, and top-k and
top-p keep all of them; if at most top-k logits are finite and top-p has nothing to cut, vLLM drops the
smallest; if more than `COLUMNS` equal values straddle the cutoffs of both top-k and top-p, vLLM may keep them
all. Here top-k and top-p follow their definitions.
"""

import torch
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

from stages.runtime.kernel_launch import CachedLaunch
from stages.runtime.top_k_kernel import COLUMNS, gather_candidates, num_rows

MAX_TOP_K = COLUMNS
MAX_VOCABULARY = 16384


@triton.jit
def _processed(
    values,
    grid,
    inside,
    state,
    position,
    num_allowed_ptr,
    allowed_ptr,
    num_biased_ptr,
    biased_ptr,
    bias_ptr,
    min_length_ptr,
    num_barred_ptr,
    barred_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    prompt_mask_ptr,
    output_counts_ptr,
    MAX_LISTED: tl.constexpr,
    MAX_BARRED: tl.constexpr,
    VOCABULARY: tl.constexpr,
):
    """Apply the request's biases and penalties."""
    # These are in page-locked host memory: issue all loads before anything waits for one of them.
    num_allowed = tl.load(num_allowed_ptr + state)
    num_biased = tl.load(num_biased_ptr + state)
    min_length = tl.load(min_length_ptr + state)
    num_barred = tl.load(num_barred_ptr + state)
    repetition = tl.load(repetition_ptr + state)
    frequency = tl.load(frequency_ptr + state)
    presence = tl.load(presence_ptr + state)

    if num_allowed > 0:
        allowed = tl.zeros_like(grid)
        for i in range(num_allowed):
            allowed += (grid == tl.load(allowed_ptr + state * MAX_LISTED + i)).to(tl.int32)
        values = tl.where(allowed > 0, values, float("-inf"))
    for i in range(num_biased):
        bias = tl.load(bias_ptr + state * MAX_LISTED + i)
        values = tl.where(grid == tl.load(biased_ptr + state * MAX_LISTED + i), values + bias, values)
    if position + 1 < min_length:
        for i in range(num_barred):
            values = tl.where(grid == tl.load(barred_ptr + state * MAX_BARRED + i), float("-inf"), values)

    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        counts = tl.load(output_counts_ptr + state * VOCABULARY + grid, mask=inside, other=0)
        is_out = counts > 0
        if repetition != 1.0:
            words = tl.load(
                prompt_mask_ptr + state * ((VOCABULARY + 31) // 32) + grid // 32, mask=inside, other=0
            )
            scale = tl.where((((words >> (grid % 32)) & 1) != 0) | is_out, repetition, 1.0)
            values *= tl.where(values > 0, 1.0 / scale, scale)
        values -= frequency * counts
        values -= presence * is_out
    return values


@triton.jit
def _is_kept(candidates_ptr, place, value, count, top_k, top_p, COLUMNS: tl.constexpr):
    """Mask of the candidates that top-k and then top-p keep, `[COLUMNS]`."""
    other = tl.load(candidates_ptr + place, mask=place < count, other=float("-inf"))[None, :]
    mine = value[:, None]
    greater = other > mine
    equal = (other == mine).to(tl.int32)
    before = tl.where(place[None, :] < place[:, None], equal, 0)
    counts = tl.sum(greater.to(tl.int32) + (before << 8) + (equal << 16), axis=1)  # each at most COLUMNS
    num_greater, num_before, num_equal = counts & 255, (counts >> 8) & 255, counts >> 16
    is_there = place < count
    kept = is_there & (num_greater + num_before < top_k)
    if top_p < 1.0:
        maximum = tl.max(value)
        total = tl.sum(tl.where(kept, tl.exp(value - maximum), 0.0))
        probability = tl.exp(value - maximum) / total
        mass_above = tl.sum(tl.where(greater, tl.exp(other - maximum) / total, 0.0), axis=1)
        mass = mass_above + num_equal * probability
        # The smallest kept value. If several are equal, vLLM keeps as many, by id, as top-p needs, but only
        # if the value survives the round trip through exp and log. Otherwise it keeps all of them.
        is_last = is_there & (num_greater < top_k) & (mass_above < top_p) & (mass >= top_p)
        excess = tl.where(is_last, (mass - top_p) / probability, 0.0).to(tl.int32)
        num_needed = tl.maximum(num_equal - excess, 1)
        is_found = tl.abs(value - (tl.log(probability * total) + maximum)) < 1e-9
        is_surplus = is_found & (num_before >= num_needed)
        kept = tl.where(is_last, ~is_surplus, kept & (mass_above < top_p))
    return kept


@triton.jit
def _sample_kernel(
    token_ptr,
    num_bad_ptr,
    candidate_ids_ptr,
    candidates_ptr,
    logits_ptr,
    logits_stride,
    state_ptr,
    position_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    seed_ptr,
    num_allowed_ptr,
    allowed_ptr,
    num_biased_ptr,
    biased_ptr,
    bias_ptr,
    min_length_ptr,
    num_barred_ptr,
    barred_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    prompt_mask_ptr,
    output_counts_ptr,
    MAX_LISTED: tl.constexpr,
    MAX_BARRED: tl.constexpr,
    VOCABULARY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    state = tl.load(state_ptr + request).to(tl.int64)
    position = tl.load(position_ptr + request)
    temperature = tl.load(temperature_ptr + state)
    top_k = tl.load(top_k_ptr + state)
    top_p = tl.load(top_p_ptr + state)
    seed = tl.load(seed_ptr + state)

    column = tl.arange(0, COLUMNS)
    grid = tl.arange(0, ROWS)[:, None] * COLUMNS + column[None, :]
    inside = grid < VOCABULARY
    values = tl.load(logits_ptr + request * logits_stride + grid, mask=inside, other=float("-inf")).to(
        tl.float32
    )
    # NaN also fails this comparison. Bar such logits, so that the kernel always samples a valid id: the next
    # step may start from it before the host has read the count.
    is_number = values < float("inf")
    tl.store(num_bad_ptr + request, tl.sum(tl.sum((is_number == 0).to(tl.int32), axis=1)))
    values = tl.where(is_number, values, float("-inf"))
    values = _processed(
        values,
        grid,
        inside,
        state,
        position,
        num_allowed_ptr,
        allowed_ptr,
        num_biased_ptr,
        biased_ptr,
        bias_ptr,
        min_length_ptr,
        num_barred_ptr,
        barred_ptr,
        repetition_ptr,
        frequency_ptr,
        presence_ptr,
        prompt_mask_ptr,
        output_counts_ptr,
        MAX_LISTED,
        MAX_BARRED,
        VOCABULARY,
    )
    if (temperature != 0.0) & (temperature != 1.0):
        values = values / temperature

    if (temperature == 0.0) | (top_k >= VOCABULARY):
        largest, row = gumbel_noised_argmax(
            values,
            grid,
            inside,
            seed,
            position,
            temperature,
            IS_DRAFTING=False,
            USE_FP64=False,
            APPLY_TEMPERATURE=False,
        )
        # The smallest id of the largest value, as in vLLM.
        token = tl.min(tl.where(largest == tl.max(largest), row * COLUMNS + column, VOCABULARY - 1))
    else:
        candidate_ids_ptr += request * COLUMNS
        candidates_ptr += request * COLUMNS
        count = gather_candidates(values, grid, top_k, candidate_ids_ptr, candidates_ptr, COLUMNS)
        ids = tl.load(candidate_ids_ptr + column, mask=column < count, other=0)
        value = tl.load(candidates_ptr + column, mask=column < count, other=float("-inf"))
        kept = _is_kept(candidates_ptr, column, value, count, top_k, top_p, COLUMNS)
        _, best = gumbel_noised_argmax(
            value,
            ids,
            kept,
            seed,
            position,
            temperature,
            IS_DRAFTING=False,
            USE_FP64=False,
            APPLY_TEMPERATURE=False,
        )
        token = tl.sum(tl.where(column == best, ids, 0))
    tl.store(token_ptr + request, token.to(tl.int64))


_launch = CachedLaunch(_sample_kernel)


def sample(
    logits: torch.Tensor,
    states: torch.Tensor,
    positions: torch.Tensor,
    scratch: tuple[torch.Tensor, torch.Tensor],
    settings: tuple[torch.Tensor, ...],
    listed: tuple[torch.Tensor, ...],
    penalties: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample tokens `[num_requests]` (int64) from `logits` `[num_requests, vocabulary]`, which are not
    modified. Also returns each request's number of NaN or +infinity logits (int32). If not 0, the token is
    a valid id but meaningless.

    `states` and `positions` `[num_requests]`: the request's row in vLLM's state tensors, and the position of
    the token before the sampled one. `scratch`: int32 and float32, `[>= num_requests, COLUMNS]`, free again
    when the kernel is done. The other tensors are vLLM's, in the kernel's order.
    """
    num_requests, vocabulary = logits.shape
    tokens = torch.empty(num_requests, dtype=torch.int64, device=logits.device)
    num_bad = torch.empty(num_requests, dtype=torch.int32, device=logits.device)
    rows = num_rows(vocabulary)
    _launch(
        (num_requests, 1, 1),
        tokens,
        num_bad,
        *scratch,
        logits,
        logits.stride(0),
        states,
        positions,
        *settings,
        *listed,
        *penalties,
        listed[1].shape[1],
        listed[-1].shape[1],
        vocabulary,
        rows,
        COLUMNS,
        num_warps=min(16, max(4, rows // 8)),
    )
    return tokens, num_bad
