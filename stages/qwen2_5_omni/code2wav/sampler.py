"""Mel spectrograms of any number of windows: batches of blocks through the DiT, with or without CUDA graphs."""

from collections.abc import Iterator, Sequence

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
        """More than `max_num_blocks` blocks are not computed at once, except for a single longer window."""
        self._dit = dit
        self._codes_per_block = codes_per_block
        self._max_num_blocks = max_num_blocks
        self._device = device
        self._graphs = _SolverGraphs(dit, bucket_sizes(max_num_blocks), device) if use_graphs else None

    def capture(self) -> None:
        """Record the CUDA graphs now instead of at their first use."""
        if self._graphs is not None:
            self._graphs.capture()

    @torch.inference_mode()
    def sample(self, jobs: Sequence[MelJob]) -> list[torch.Tensor]:
        """Per window its mel spectrogram, float32 [num_frames, mel_dim] on the device, natural logarithm.

        No two of `jobs` may have one slot.
        """
        mels: list[torch.Tensor] = []
        for batch, num_blocks in self._batches(jobs):
            size = num_blocks if self._graphs is None else self._graphs.bucket(num_blocks)
            packed = pack_windows(
                batch, codes_per_block=self._codes_per_block, num_blocks=size, device=self._device
            )
            frames = self._solve(packed).flatten(0, 1)
            mels.extend(frames[first : first + count] for first, count in packed.spans)
        return mels

    def _batches(self, jobs: Sequence[MelJob]) -> Iterator[tuple[Sequence[MelJob], int]]:
        start, total = 0, 0
        for index, job in enumerate(jobs):
            count = num_blocks_of(len(job.codes), self._codes_per_block)
            if index > start and total + count > self._max_num_blocks:
                yield jobs[start:index], total
                start, total = index, 0
            total += count
        if start < len(jobs):
            yield jobs[start:], total

    def _solve(self, packed: PackedWindows) -> torch.Tensor:
        bias = self._dit.input_bias(packed.layout, packed.codes)
        if self._graphs is not None and packed.layout.num_blocks in self._graphs.sizes:
            return self._graphs.solve(packed, bias)
        state = packed.noise
        for interval in self._dit.intervals:
            state = self._dit.advance(state, bias, packed.layout, interval)
        return state


def bucket_sizes(largest: int) -> list[int]:
    """Numbers of blocks that graphs are made for: each one up to 8, then steps of about an eighth."""
    sizes = [1]
    while sizes[-1] < largest:
        sizes.append(min(sizes[-1] + max(1, sizes[-1] // 8), largest))
    return sizes


class _SolverGraphs:
    """One CUDA graph per bucket; it computes one interval of the solver, whose times are inputs.

    All graphs share their inputs' memory, of which a smaller graph uses the front, and the memory in between.
    """

    def __init__(self, dit: PackedDiT, sizes: list[int], device: torch.device) -> None:
        self.sizes = sizes
        self._dit = dit
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        largest, size = sizes[-1], dit.block_size
        self._state = torch.zeros(largest, size, dit.mel_dim, device=device)
        self._bias = torch.zeros(dit.num_branches, largest, size, dit.hidden_size, device=device)
        self._layout = BlockLayout(empty_table(largest, size).to(device), size)
        self._interval = Interval(*(tensor.clone() for tensor in dit.intervals[0]))

    def bucket(self, num_blocks: int) -> int:
        """The smallest size with a graph that holds `num_blocks`, or `num_blocks` itself if none does."""
        return next((size for size in self.sizes if size >= num_blocks), num_blocks)

    @torch.inference_mode()
    def capture(self) -> None:
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            self._graph(size)

    def solve(self, packed: PackedWindows, bias: torch.Tensor) -> torch.Tensor:
        """The state at time 1, float32 [blocks, frames, mel_dim], a fresh tensor."""
        size = packed.layout.num_blocks
        graph = self._graph(size)
        self._layout.first(size).table.copy_(packed.layout.table)
        self._state[:size].copy_(packed.noise)
        self._bias[:, :size].copy_(bias)
        for interval in self._dit.intervals:
            for own, given in zip(self._interval, interval, strict=True):
                own.copy_(given)
            graph.replay()
        return self._state[:size].clone()

    def _graph(self, size: int) -> torch.cuda.CUDAGraph:
        if size not in self._graphs:
            # Blocks of the last batch would be kept in their slots again.
            self._layout.table.copy_(empty_table(*self._state.shape[:2]))
            self._advance(size)  # compiles kernels and lets cuBLAS allocate, which a capture must not
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._advance(size)
            self._graphs[size] = graph
        return self._graphs[size]

    def _advance(self, size: int) -> None:
        state = self._state[:size]
        state.copy_(self._dit.advance(state, self._bias[:, :size], self._layout.first(size), self._interval))
