"""Predicted codes as CUDA graphs: all codebooks of a frame, with sampling, in one graph per batch size.

A predictor is a small model that runs once per codebook. Launched one by one, its kernels, thousands for each
frame, take the host many times longer than the GPU needs for them.

The graphs are recorded with vLLM's own, for the first time when it measures their memory, and are kept from
then on: unlike vLLM's, they read no KV cache. Their memory is a pool of their own, because vLLM may still read
the output of its graphs after the codes have been predicted.
"""

import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from vllm.distributed.parallel_state import graph_capture

from stages.runtime.code_sampling import Draws
from stages.runtime.frame_predictor import FramePredictor, batch_sizes, predicted_codes

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes a function that reads and writes tensors at fixed addresses, and returns one that repeats its work."""


class PredictorGraphs:
    """Implements `PredictCodes`: `predicted_codes` for up to `max_num_seqs` tokens.

    A batch is padded with rows that an earlier one left behind; nobody reads their codes. One stream runs the
    steps, also with asynchronous scheduling: the next step's inputs are written after this step's replay.
    """

    def __init__(self, predictor: FramePredictor, hidden: torch.Tensor, record: Record) -> None:
        """Records the graphs. `hidden` `[max_num_seqs, width]`: zeros in the type and on the device of the
        hidden states; becomes the graphs' input."""
        self._hidden = hidden
        self._sampled = hidden.new_zeros(len(hidden), dtype=torch.int64)
        self._draws = hidden.new_zeros(len(Draws._fields), len(hidden), dtype=torch.int64)
        self._codes = hidden.new_zeros(len(hidden), predictor.num_predicted, dtype=torch.int16)
        self._predictor = predictor
        self._sizes = batch_sizes(len(hidden))
        # The largest first: the others then reuse its memory.
        self._replay = {size: record(self._work(size)) for size in reversed(self._sizes)}

    def _work(self, size: int) -> Callable[[], None]:
        def work() -> None:
            draws = Draws(*self._draws[:, :size])
            codes = predicted_codes(self._predictor, self._hidden[:size], self._sampled[:size], draws)
            self._codes[:size] = codes

        return work

    def __call__(self, hidden: torch.Tensor, sampled: torch.Tensor, draws: Draws) -> torch.Tensor:
        count = len(hidden)
        self._hidden[:count] = hidden
        self._sampled[:count] = sampled
        torch.stack(draws, out=self._draws[:, :count])
        self._replay[self._sizes[bisect.bisect_left(self._sizes, count)]]()
        return self._codes[:count].clone()


@contextmanager
def cuda_graph_recorder(device: torch.device) -> Iterator[Record]:
    """Records CUDA graphs that share their memory: only one may run at a time."""
    with graph_capture(device) as context:  # on another stream; with tensor parallelism, readies all-reduce
        pool = torch.cuda.graph_pool_handle()

        def record(work: Callable[[], None]) -> Callable[[], None]:
            work()  # compiles kernels and allocates workspaces outside the recording
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool, context.stream):
                work()
            return graph.replay

        yield record
