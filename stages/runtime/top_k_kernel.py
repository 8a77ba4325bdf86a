"""The candidates of top-k in a row of logits, without a sort: a part of our sampling kernels.

Registers hold the row as a grid of `ROWS * COLUMNS` values. The k-th largest column maximum is a lower bound
of the k-th largest value, and usually a tight one: the values not below it fit into `COLUMNS` places of
scratch memory. `COLUMNS` is therefore the largest top-k.
"""

import triton
import triton.language as tl

COLUMNS = 128


def num_rows(vocabulary: int) -> int:
    """`ROWS` for a row of `vocabulary` logits."""
    return max(2, 1 << (-(-vocabulary // COLUMNS) - 1).bit_length())  # a power of two


@triton.jit
def _sortable(value):
    """Map float32 to int32 in the same order. The same bit operation maps back."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def gather_candidates(values, grid, top_k, candidate_ids_ptr, candidates_ptr, COLUMNS: tl.constexpr):
    """Write the `top_k` largest values, and possibly more, to scratch memory `[COLUMNS]`, with ascending ids
    among equal values; all finite values if fewer exist. Returns their number."""
    is_finite = values > float("-inf")
    maxima = tl.max(values, axis=0)
    num_not_below = tl.sum((maxima[:, None] >= maxima[None, :]).to(tl.int32), axis=0)
    bound = tl.max(tl.where(num_not_below >= top_k, maxima, float("-inf")))
    count = tl.sum(tl.sum(((values >= bound) & is_finite).to(tl.int32), axis=1))
    if count > COLUMNS:
        # Large values share columns or are equal: bisect, if necessary down to the exact k-th largest value.
        keys = tl.where(is_finite, _sortable(values), -0x80000000)
        low = tl.maximum(_sortable(bound), -0x7FFFFFFF).to(tl.int64)  # at least top_k keys are not below
        high = _sortable(tl.max(maxima)).to(tl.int64) + 1  # fewer than top_k are not below
        while (count > COLUMNS) & (high - low > 1):
            middle = low + (high - low) // 2
            num = tl.sum(tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=1))
            is_enough = num >= top_k
            count = tl.where(is_enough, num, count)
            low = tl.where(is_enough, middle, low)
            high = tl.where(is_enough, high, middle)
        low_bits = low.to(tl.int32)
        bound = (low_bits ^ ((low_bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)

    # Places: first the values above the bound, then those equal to it, each by id. Both are counted together,
    # in the two halves of an integer.
    above = ((values > bound) & is_finite).to(tl.int32)
    equal = ((values == bound) & is_finite).to(tl.int32)
    both = above + (equal << 16)
    of_row = tl.sum(both, axis=1)
    place = (tl.cumsum(of_row, axis=0) - of_row)[:, None] + tl.cumsum(both, axis=1) - both
    total = tl.sum(of_row)
    num_above = total & 0xFFFF
    place = tl.where(above != 0, place & 0xFFFF, num_above + (place >> 16))
    is_taken = (above + equal > 0) & (place < COLUMNS)
    tl.store(candidate_ids_ptr + place, grid, mask=is_taken)
    tl.store(candidates_ptr + place, values, mask=is_taken)
    tl.debug_barrier()
    return tl.minimum(num_above + (total >> 16), COLUMNS)
