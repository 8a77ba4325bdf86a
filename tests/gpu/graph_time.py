"""How long kernels take on the GPU, without the host's part."""

import statistics
from collections.abc import Callable

import torch


def microseconds(work: Callable[[], object]) -> float:
    """Median of ten replays of a CUDA graph of `work`."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(10):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)
