"""Computes mel spectrograms: runs batches of blocks through the DiT, with or without CUDA graphs."""

from collections.abc import Sequence
from functools import partial

import torch

from stages.qwen2_5_omni.code2wav.dit import Interval, PackedDiT
from stages.qwen2_5_omni.code2wav.packing import (
    BlockLayout,
    MelJob,
    PackedWindows,
    empty_table,
    num_blocks_of,
    pack_windows,
)
from stages.runtime.cuda_graphs import CudaGraphRecorder, Work


class MelSampler:
    """Runs `PackedDiT` over packed windows."""

    def __init__(
        self,
        dit: PackedDiT,
        *,
        codes_per_block: int,
        max_num_blocks: int,
        device: torch.device,
        use_graphs: bool,
    ) -> None:
        """With `use_graphs`, records CUDA graphs for batches of at most `max_num_blocks` blocks."""
        self._dit = dit
        self._codes_per_block = codes_per_block
        self._device = device
        self._graphs = _SolverGraphs(dit, bucket_sizes(max_num_blocks), device) if use_graphs else None

    @torch.inference_mode()
    def sample(self, jobs: Sequence[MelJob]) -> list[torch.Tensor]:
        """Returns log mel spectrograms (base e), float32 [num_frames, mel_dim] on the device, per job.

        No two `jobs` may share a slot.
        """
        num_blocks = sum(num_blocks_of(len(job.codes), self._codes_per_block) for job in jobs)
        size = num_blocks if self._graphs is None else self._graphs.bucket(num_blocks)
        packed = pack_windows(
            jobs, codes_per_block=self._codes_per_block, num_blocks=size, device=self._device
        )
        frames = self._solve(packed).flatten(0, 1)
        return [frames[first : first + count] for first, count in packed.spans]

    def _solve(self, packed: PackedWindows) -> torch.Tensor:
        bias = self._dit.input_bias(packed.layout, packed.codes)
        if self._graphs is not None and packed.layout.num_blocks in self._graphs.sizes:
            return self._graphs.solve(packed, bias)
        state = packed.noise
        for interval in self._dit.intervals:
            state = self._dit.advance(state, bias, packed.layout, interval)
        return state


def bucket_sizes(largest: int) -> list[int]:
    """Block counts that have a graph: each one up to 8, then in steps of about an eighth."""
    sizes = [1]
    while sizes[-1] < largest:
        sizes.append(min(sizes[-1] + max(1, sizes[-1] // 8), largest))
    return sizes


class _SolverGraphs:
    """One CUDA graph per bucket, which computes one interval of the solver with the times as inputs.

    All graphs share input memory, of which a smaller graph uses the front, and intermediate memory.
    """

    def __init__(self, dit: PackedDiT, sizes: list[int], device: torch.device) -> None:
        self.sizes = sizes
        self._dit = dit
        self._record = CudaGraphRecorder()
        largest, size = sizes[-1], dit.block_size
        self._state = torch.zeros(largest, size, dit.mel_dim, device=device)
        self._bias = torch.zeros(dit.num_branches, largest, size, dit.hidden_size, device=device)
        self._layout = BlockLayout(empty_table(largest, size).to(device), size)
        self._interval = Interval(*(tensor.clone() for tensor in dit.intervals[0]))
        self._replay = {size: self._recorded(size) for size in reversed(sizes)}

    def bucket(self, num_blocks: int) -> int:
        """The smallest graph size that fits `num_blocks`, of which a step has at most `sizes[-1]`."""
        return next(size for size in self.sizes if size >= num_blocks)

    def solve(self, packed: PackedWindows, bias: torch.Tensor) -> torch.Tensor:
        """The state at time 1, float32 [blocks, frames, mel_dim], in a new tensor."""
        size = packed.layout.num_blocks
        self._layout.first(size).table.copy_(packed.layout.table)
        self._state[:size].copy_(packed.noise)
        self._bias[:, :size].copy_(bias)
        for interval in self._dit.intervals:
            for own, given in zip(self._interval, interval, strict=True):
                own.copy_(given)
            self._replay[size]()
        return self._state[:size].clone()

    def _recorded(self, size: int) -> Work:
        self._advance(size)  # compile kernels and let cuBLAS allocate: not allowed in a capture
        torch.cuda.synchronize()
        return self._record(partial(self._advance, size))

    def _advance(self, size: int) -> None:
        state = self._state[:size]
        state.copy_(self._dit.advance(state, self._bias[:, :size], self._layout.first(size), self._interval))
