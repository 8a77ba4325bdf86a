"""Passes of the network as CUDA graphs of a few fixed shapes.

Eagerly, the host needs longer to launch the kernels of a short pass than the GPU to run them. Lengths are
powers of two, and shorter windows are padded, so that windows of any lengths share a pass. If there are fewer
streams than a graph has rows, the others are padding, too: code 0 in the first step of a stream, in a slot
that no stream has and all of them share. Such a step reads no state, and what it leaves is never read.
"""

import bisect
from dataclasses import dataclass
from functools import partial

import torch

from omni_server.errors import ConfigError
from stages.qwen_codec.code2wav.network import Code2WavNetwork
from stages.qwen_codec.code2wav.passes import PLACE_COLUMNS, Passes
from stages.runtime.cuda_graphs import Record, Work, batch_sizes

LONGEST_GRAPH_FRAMES = 8
"""The longest windows of the family's chunk plan. Longer ones take several passes."""


@dataclass(frozen=True)
class _Graph:
    rows: torch.Tensor
    """Input, int64 [num_rows, PLACE_COLUMNS + length * codebooks]: the place and the codes of each stream."""
    samples: torch.Tensor
    """Output, [num_rows, length * samples per frame]."""
    replay: Work


class GraphedPasses(Passes):
    """Once all graphs are recorded, no pass runs eagerly."""

    pads = True

    def __init__(
        self,
        network: Code2WavNetwork,
        record: Record,
        *,
        num_slots: int,
        max_num_streams: int,
        max_frames: int,
    ) -> None:
        """A pass has at most `max_num_streams` streams and at most `max_frames` frames in total, both at
        least 1. Raises `ConfigError` if memory runs out."""
        # The last slot is for padding.
        super().__init__(network, num_slots=num_slots + 1, max_frames=max_frames)
        self.num_slots = num_slots
        self._num_rows = {
            length: batch_sizes(min(max_num_streams, max_frames // length))
            for length in powers_of_two(min(LONGEST_GRAPH_FRAMES, max_frames))
        }
        """For each length of a pass, the sizes of its graphs."""
        try:
            self._graphs = self._recorded(record)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"code2wav has no room for CUDA graphs of up to {max_num_streams} streams: raise its "
                "gpu_memory_utilization, lower its max_num_seqs or max_num_batched_tokens, or set its "
                "engine_args.enforce_eager"
            ) from None

    def length(self, num_frames: int) -> int:
        return next((length for length in self._num_rows if length >= num_frames), max(self._num_rows))

    def max_num_streams(self, length: int) -> int:
        return self._num_rows[length][-1]

    def run(self, codes: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        num_streams, length = codes.shape[:2]
        sizes = self._num_rows[length]
        num_rows = sizes[bisect.bisect_left(sizes, num_streams)]
        graph = self._graphs[num_rows, length]
        graph.rows.copy_(self._rows(num_rows, codes, places))
        graph.replay()
        return graph.samples[:num_streams].clone()  # the graph's next replay overwrites them

    @torch.inference_mode()
    def _recorded(self, record: Record) -> dict[tuple[int, int], _Graph]:
        shapes = [(num_rows, length) for length, sizes in self._num_rows.items() for num_rows in sizes]
        shapes.sort(key=lambda shape: shape[0] * shape[1], reverse=True)
        passes = []
        for num_rows, length in shapes:
            nothing = torch.zeros(0, length, self._network.num_codebooks, dtype=torch.int64)
            rows = self._rows(num_rows, nothing, nothing.new_zeros(0, PLACE_COLUMNS)).to(self._device)
            passes.append((rows, torch.empty_like(self._samples(rows))))
        return {
            shape: _Graph(rows, samples, record(partial(self._compute_into, samples, rows)))
            for shape, (rows, samples) in zip(shapes, passes, strict=True)
        }

    def _rows(self, num_rows: int, codes: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Returns `_Graph.rows`, on the CPU, with the arguments of `run` and padding behind them."""
        num_streams = len(codes)
        rows = torch.zeros(num_rows, PLACE_COLUMNS + codes.shape[1:].numel(), dtype=torch.int64)
        rows[:num_streams, :PLACE_COLUMNS] = places
        rows[:num_streams, PLACE_COLUMNS:] = codes.flatten(1)
        rows[num_streams:, 0] = self.num_slots
        return rows

    def _compute_into(self, samples: torch.Tensor, rows: torch.Tensor) -> None:
        samples.copy_(self._samples(rows))

    def _samples(self, rows: torch.Tensor) -> torch.Tensor:
        codes = rows[:, PLACE_COLUMNS:].unflatten(1, (-1, self._network.num_codebooks))
        return self._compute(codes, rows[:, :PLACE_COLUMNS])


def powers_of_two(largest: int) -> list[int]:
    """Those up to `largest`, which is at least 1."""
    return [1 << exponent for exponent in range(largest.bit_length())]
