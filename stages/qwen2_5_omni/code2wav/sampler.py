"""Mel spectrograms of any number of windows: batches of blocks through the DiT, as CUDA graphs where that is
wanted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from stages.qwen2_5_omni.code2wav.dit import Interval, PackedDiT
from stages.qwen2_5_omni.code2wav.packing import (
    Carry,
    PackedWindows,
    empty_layout,
    num_blocks_of,
    pack_windows,
)


@dataclass(frozen=True)
class MelJob:
    """One window."""

    codes: torch.Tensor
    """int64 [num_codes] on the CPU."""
    noise: torch.Tensor
    """float32 [num_codes * frames per code, mel_dim] on the CPU."""
    voice: int
    """Index of the voice in the order that `PackedDiT` was given."""
    carry: Carry | None = None
    """Its part in a stream. If it reads, `codes` and `noise` begin behind the block that it reads."""


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
                [job.codes for job in batch],
                [job.noise for job in batch],
                [job.voice for job in batch],
                [job.carry for job in batch],
                codes_per_block=self._codes_per_block,
                num_blocks=size,
                device=self._device,
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
        if self._graphs is not None and packed.num_blocks in self._graphs.sizes:
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
        self.sizes = frozenset(sizes)
        self._ordered = sizes
        self._dit = dit
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        largest, size = sizes[-1], dit.block_size
        branches = 2 if dit.is_guided else 1
        self._state = torch.zeros(largest, size, dit.mel_dim, device=device)
        self._bias = torch.zeros(branches, largest, size, dit.hidden_size, device=device)
        self._layout = empty_layout(largest, size, device)
        first = dit.intervals[0]
        self._interval = Interval(
            *(tensor.clone() for tensor in (first.number, first.step, first.modulation, first.final))
        )

    def bucket(self, num_blocks: int) -> int:
        """The smallest size with a graph that holds `num_blocks`, or `num_blocks` itself if none does."""
        return next((size for size in self._ordered if size >= num_blocks), num_blocks)

    @torch.inference_mode()
    def capture(self) -> None:
        for size in reversed(self._ordered):  # the largest first: the others fit into its memory
            self._graph(size)

    def solve(self, packed: PackedWindows, bias: torch.Tensor) -> torch.Tensor:
        """The state at time 1, float32 [blocks, frames, mel_dim], a fresh tensor."""
        size = packed.num_blocks
        graph = self._graph(size)
        self._layout.first(size).copy_(packed.layout)
        self._state[:size].copy_(packed.noise)
        self._bias[:, :size].copy_(bias)
        for interval in self._dit.intervals:
            self._interval.number.copy_(interval.number)
            self._interval.step.copy_(interval.step)
            self._interval.modulation.copy_(interval.modulation)
            self._interval.final.copy_(interval.final)
            graph.replay()
        return self._state[:size].clone()

    def _graph(self, size: int) -> torch.cuda.CUDAGraph:
        if size not in self._graphs:
            # Blocks of the last batch would be kept in their slots again.
            self._layout.copy_(empty_layout(self._ordered[-1], self._dit.block_size, self._state.device))
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
