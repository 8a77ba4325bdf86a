"""Rows in: puts the rows that another stage sent onto the input embeddings, by absolute position."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from omni_server.protocol.rows import RowsFeed, RowsInput
from omni_server.protocol.runtime_config import QueueSpec
from stages.runtime.batch import StepBatch
from stages.runtime.queue_end import open_queue
from stages.runtime.row_store import RowStore
from stages.runtime.row_upload import RowUpload


class RowOverlay:
    """Holds the rows of every request that is fed, from its first feed until it ends.

    One rule covers prefill in chunks, decoding and recomputation after a preemption: at position p the row
    replaces the token embedding if p < `num_replaced` of the request, and is added to it otherwise.
    """

    def __init__(self, queue: QueueSpec | None, tensor_parallel_rank: int) -> None:
        self._store = RowStore(open_queue(queue), tensor_parallel_rank)
        self._upload = RowUpload()

    def __len__(self) -> int:
        return len(self._store)

    def feed(self, request_id: str, feed: RowsFeed) -> None:
        """Raises `ValueError` for a stale reference or a gap."""
        self._store.add(request_id, feed)

    def announce(self, request_id: str, rows_input: RowsInput) -> None:
        self._store.announce(request_id, rows_input.num_replaced)

    def remove(self, request_id: str) -> None:
        self._store.remove(request_id)
        self._upload.rows_changed()  # another request may get its places

    def prompt_positions(self, request_id: str, prompt_length: int) -> tuple[torch.Tensor, int] | None:
        """M-RoPE positions `[3, prompt_length]` and delta that came with the rows, or None."""
        return self._store.sequence_positions(request_id, prompt_length)

    def apply(self, embeds: torch.Tensor, batch: StepBatch) -> None:
        """Overlay in place; `embeds` is `[>= num_tokens, width]`, the buffer that the model reads.

        Raises `IndexError` if a row that is needed has not come.
        """
        slots = self._store.slots.of_batch(batch.request_ids)
        positions = batch.first_positions
        if not batch.is_decode:
            slots = np.repeat(slots, batch.num_tokens)
            positions = np.repeat(positions - batch.offsets, batch.num_tokens) + np.arange(len(slots))
        tokens = None
        if slots.min(initial=0) < 0:  # requests of the step that are not fed
            (tokens,) = np.nonzero(slots >= 0)
            slots, positions = slots[tokens], positions[tokens]
        if not len(slots):
            return
        is_added = positions >= self._store.num_replaced[slots]
        index = self._store.locate(slots, positions)
        rows = self._upload.upload(self._store.rows, index, embeds.device)
        rows = rows.view(self._store.dtype).to(embeds.dtype)
        if tokens is None:
            _lay_over(embeds[: len(rows)], rows, is_added)
        else:
            where = async_tensor_h2d(tokens, embeds.device)
            picked = embeds[where]
            _lay_over(picked, rows, is_added)
            embeds[where] = picked

    def added_rows(
        self, request_ids: list[str], positions: npt.NDArray[np.signedinteger[Any]], embeds: torch.Tensor
    ) -> torch.Tensor | None:
        """Rows of these positions, one of each request, for whoever adds them: `[num_requests, width]`, of `embeds`'
        type and on its device. None if a request is not fed, or a row replaces the embedding.

        Raises `IndexError` if a row has not come.
        """
        slots = self._store.slots.of_batch(request_ids)
        if slots.min() < 0 or (positions < self._store.num_replaced[slots]).any():
            return None
        index = self._store.locate(slots, positions.astype(np.int64))
        rows = self._upload.upload(self._store.rows, index, embeds.device)
        return rows.view(self._store.dtype).to(embeds.dtype)


def _lay_over(embeds: torch.Tensor, rows: torch.Tensor, is_added: npt.NDArray[np.bool_]) -> None:
    """In place, `[n, width]` each; `is_added` `[n]` (bool) tells where the row is added and does not replace."""
    if is_added.all():
        embeds.add_(rows)
    elif not is_added.any():
        embeds.copy_(rows)
    else:
        added = async_tensor_h2d(is_added, embeds.device)
        embeds.copy_(torch.where(added[:, None], embeds + rows, rows))
