"""Records work on the device, to be repeated without the host."""

from collections.abc import Callable

import torch

Work = Callable[[], object]
"""Reads and writes tensors at fixed addresses."""

Record = Callable[[Work], Work]
"""Records the device's part of a work and returns what repeats it. The work has run before, so that all
kernels are compiled and all workspaces allocated."""


class CudaGraphRecorder:
    """Implements `Record` with CUDA graphs that share the memory of their intermediate results: only one may
    run at a time. Record the largest first: the others fit in its memory."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        """`stream`: where to record; None: one of torch's."""
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = stream

    def __call__(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream):
            work()
        return graph.replay


def batch_sizes(largest: int) -> list[int]:
    """Powers of two, and the largest batch, ascending: a step takes as long as reading the weights, so the
    rows that are added to a batch cost little. For the same reason, kernels differ only between these
    sizes."""
    return [*(1 << power for power in range((largest - 1).bit_length())), largest]
