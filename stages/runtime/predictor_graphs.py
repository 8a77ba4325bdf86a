"""Predicted codes as CUDA graphs: all codebooks of a frame, with sampling, in one graph per batch size.

A predictor is a small model that runs once per codebook. Launched one by one, its kernels, thousands for each
frame, take the host many times longer than the GPU needs for them.

The graphs are recorded with vLLM's own, for the first time when it measures their memory, and are kept from
then on: unlike vLLM's, they read no KV cache. Their memory is a pool of their own, because vLLM may still
read the output of its graphs after the codes have been predicted."""

import bisect
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.distributed.parallel_state import graph_capture

from stages.runtime.code_sampling import Draws
from stages.runtime.cuda_graphs import CudaGraphRecorder, Record, Work, batch_sizes
from stages.runtime.frame_predictor import FramePredictor, predicted_codes


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
        self._replay = {size: self._recorded(size, record) for size in reversed(self._sizes)}

    def _recorded(self, size: int, record: Record) -> Work:
        def work() -> None:
            draws = Draws(*self._draws[:, :size])
            codes = predicted_codes(self._predictor, self._hidden[:size], self._sampled[:size], draws)
            self._codes[:size] = codes

        work()
        return record(work)

    def __call__(self, hidden: torch.Tensor, sampled: torch.Tensor, draws: Draws) -> torch.Tensor:
        count = len(hidden)
        self._hidden[:count] = hidden
        self._sampled[:count] = sampled
        torch.stack(draws, out=self._draws[:, :count])
        self._replay[self._sizes[bisect.bisect_left(self._sizes, count)]]()
        return self._codes[:count].clone()


@contextmanager
def cuda_graph_recorder(device: torch.device) -> Iterator[Record]:
    """Records on another stream; with tensor parallelism, readies all-reduce."""
    with graph_capture(device) as context:
        yield CudaGraphRecorder(context.stream)
