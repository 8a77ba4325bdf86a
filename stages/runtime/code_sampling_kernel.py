"""The choice of predicted codes in one Triton kernel: from logits to ids, one program per row.

With torch's operations, as in `code_sampling.CodeChooser`, it takes about fifty kernels per codebook. The
noise is the same but for the last digits of its logarithms. Of equal logits at the end of top-k or top-p, the
smaller ids stay; torch's choice among them is arbitrary.
"""

import torch
import triton
import triton.language as tl

from stages.runtime.code_sampling import CodeSampling, Draws
from stages.runtime.kernel_launch import CachedLaunch
from stages.runtime.top_k_kernel import COLUMNS, gather_candidates, num_rows

MAX_TOP_K = COLUMNS


@triton.jit
def _mixed(bits):
    """See `code_sampling._mixed`; `bits` are uint32."""
    bits = bits + 0x9E3779B9
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _gumbel_noise(seed, position, codebook, ids):
    """See `code_sampling.gumbel_noise`."""
    state = _mixed(((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    state = _mixed((seed & 0xFFFFFFFF).to(tl.uint32) ^ state)
    state = _mixed(state ^ (position & 0xFFFFFFFF).to(tl.uint32))
    bits = _mixed(_mixed(state ^ codebook) ^ ids.to(tl.uint32))
    uniform = ((bits >> 9).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / (1 << 23))
    return -tl.log(-tl.log(uniform))


@triton.jit
def _choose_kernel(
    code_ptr,
    is_broken_ptr,
    candidate_ids_ptr,
    candidates_ptr,
    logits_ptr,
    logits_stride,
    position_ptr,
    seed_ptr,
    is_greedy_ptr,
    codebook,
    TEMPERATURE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    VOCABULARY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    grid = tl.arange(0, ROWS)[:, None] * COLUMNS + column[None, :]
    inside = grid < VOCABULARY
    values = tl.load(logits_ptr + request * logits_stride + grid, mask=inside, other=float("-inf")).to(
        tl.float32
    )
    # NaN also fails this comparison. So the id is valid, whatever the logits are: it is looked up next.
    is_number = values < float("inf")
    if tl.min(tl.min(is_number.to(tl.int32), axis=0)) == 0:
        tl.store(is_broken_ptr + request, 1)
    values = tl.where(is_number, values, float("-inf"))
    if tl.load(is_greedy_ptr + request) != 0:
        largest = tl.max(tl.max(values, axis=0))
        code = tl.min(tl.min(tl.where(values == largest, grid, VOCABULARY - 1), axis=0))
    else:
        candidate_ids_ptr += request * COLUMNS
        candidates_ptr += request * COLUMNS
        count = gather_candidates(
            values / TEMPERATURE, grid, TOP_K, candidate_ids_ptr, candidates_ptr, COLUMNS
        )
        is_there = column < count
        ids = tl.load(candidate_ids_ptr + column, mask=is_there, other=0)
        value = tl.load(candidates_ptr + column, mask=is_there, other=float("-inf"))
        other = tl.load(candidates_ptr + column, mask=is_there, other=float("-inf"))[None, :]
        mine = value[:, None]
        maximum = tl.where(count > 0, tl.max(value), 0.0)
        is_before = (other > mine) | ((other == mine) & (column[None, :] < column[:, None]))
        is_likely = is_there & (tl.sum(is_before.to(tl.int32), axis=1) < TOP_K)
        total = tl.sum(tl.where(is_likely, tl.exp(value - maximum), 0.0))
        before = tl.sum(tl.where(is_before, tl.exp(other - maximum), 0.0), axis=1)
        seed, position = tl.load(seed_ptr + request), tl.load(position_ptr + request)
        noised = value + _gumbel_noise(seed, position, codebook, ids)
        best = tl.argmax(tl.where(is_likely & (before < TOP_P * total), noised, float("-inf")), axis=0)
        code = tl.sum(tl.where(column == best, ids, 0))
    tl.store(code_ptr + request, code.to(tl.int64))


_launch = CachedLaunch(_choose_kernel)


class CodeKernel:
    """A `Chooser` for one step, as `code_sampling.CodeChooser`, for top-k from 1 to `MAX_TOP_K`."""

    def __init__(self, sampling: CodeSampling, draws: Draws) -> None:
        self._sampling = sampling
        self._draws = draws
        self.is_broken = draws.seeds.new_zeros(len(draws.seeds), dtype=torch.bool)
        scratch = (len(draws.seeds), COLUMNS)
        self._scratch = (
            draws.seeds.new_empty(scratch, dtype=torch.int32),
            draws.seeds.new_empty(scratch, dtype=torch.float32),
        )

    def __call__(self, logits: torch.Tensor, codebook: int) -> torch.Tensor:
        count, vocabulary = logits.shape
        codes = self._draws.seeds.new_empty(count)
        rows = num_rows(vocabulary)
        logits = logits.contiguous()
        _launch(
            (count, 1, 1),
            codes,
            self.is_broken,
            *self._scratch,
            logits,
            logits.stride(0),
            *self._draws,
            codebook,
            self._sampling.temperature,
            min(self._sampling.top_k, vocabulary),
            self._sampling.top_p,
            vocabulary,
            rows,
            COLUMNS,
            num_warps=min(16, max(4, rows // 8)),
        )
        return codes
