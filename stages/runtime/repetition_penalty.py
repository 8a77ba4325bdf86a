"""The repetition penalty of fed stages on vLLM's V1 model runner, kept on the device, as V2 does by itself.

V1's own penalties turn the ids of every request's whole output into a tensor at each step, and with async
scheduling the host has to wait for the step before: its ids are on the device only
(`InputBatch.update_async_output_token_ids`). Here a table on the device says which ids a request has seen. It is
updated with the ids that a step computes on, and these are what was sampled last.
"""

import numpy as np
import numpy.typing as npt
import torch
from vllm._custom_ops import apply_repetition_penalties
from vllm.utils.torch_utils import async_tensor_h2d

from stages.runtime.batch import StepBatch
from stages.runtime.request_slots import RequestSlots


class RepetitionPenalty:
    """Requests by id, wherever vLLM puts them in its batch. Prompt and output count, as in the reference.

    A request keeps its row while it is preempted or held back: computing its tokens again marks the same ids.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slots = RequestSlots()
        # Row 0 stands for all requests without a penalty; the row of slot i is i + 1.
        self._penalties = np.ones(1, np.float32)  # [num_rows]
        self._seen = torch.zeros(1, vocab_size, dtype=torch.bool, device=device)  # [num_rows, vocab_size]
        self._true = torch.ones((), dtype=torch.bool, device=device)
        # What `_rows` last worked out.
        self._batch_slots: npt.NDArray[np.int64] | None = None
        self._batch_rows = torch.empty(0, dtype=torch.int64, device=device)
        self._batch_penalties = torch.empty(0, device=device)

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, request_id: str, penalty: float) -> None:
        """`penalty` > 0; with 1 nothing has to be remembered."""
        if penalty == 1:
            return
        row = self._slots.add(request_id) + 1
        if row >= len(self._penalties):
            more = max(8, len(self._penalties))
            self._penalties = np.concatenate([self._penalties, np.ones(more, np.float32)])
            self._seen = torch.cat([self._seen, self._seen.new_zeros(more, self._vocab_size)])
        self._penalties[row] = penalty
        self._seen[row] = False

    def remove(self, request_id: str) -> None:
        self._slots.remove(request_id)

    def see(self, token_ids: torch.Tensor, batch: StepBatch) -> None:
        """`token_ids` `[num_tokens]`, on the device: what this step computes on."""
        if not self._slots:
            return
        if batch.is_decode:
            rows = self._rows(batch)
        else:
            slots = np.repeat(self._slots.of_batch(batch.request_ids), batch.num_tokens)
            rows = async_tensor_h2d(slots + 1, self._device)
        self._seen.index_put_((rows, token_ids.long()), self._true)

    def apply(self, logits: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Penalised logits `[num_requests, vocab_size]`, float32: the type in which vLLM's sampler penalises."""
        if not self._slots:
            return logits
        rows = self._rows(batch)
        logits = logits.float()
        seen = self._seen[rows]
        apply_repetition_penalties(logits, seen, seen, self._batch_penalties)
        return logits

    def _rows(self, batch: StepBatch) -> torch.Tensor:
        """Row of each request, `[num_requests]`, on the device."""
        slots = self._slots.of_batch(batch.request_ids)
        if slots is not self._batch_slots:
            self._batch_slots = slots
            self._batch_rows = async_tensor_h2d(slots + 1, self._device)
            self._batch_penalties = async_tensor_h2d(self._penalties[slots + 1], self._device)
        return self._batch_rows
