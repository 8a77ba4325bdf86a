"""Rows in: puts the rows that another stage sent onto the input embeddings, by absolute position."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from omni_server.protocol.corruption import Corruption
from omni_server.protocol.rows import RowsFeed, RowsInput
from omni_server.protocol.runtime_config import QueueSpec
from stages.runtime.batch import StepBatch
from stages.runtime.queue_end import open_queue
from stages.runtime.row_store import MissingRowError, RowStore
from stages.runtime.row_upload import RowUpload


class RowOverlay:
    """Holds the rows of every request that is fed, from its first feed until it ends.

    One rule covers prefill in chunks, decoding and recomputation after a preemption: at position p the row
    replaces the token embedding if p < `num_replaced` of the request, and is added to it otherwise.

    A request whose rows cannot be right has none from then on, so that the others of its steps are computed as ever;
    what is computed for itself means nothing, and `take_findings` tells of it.
    """

    def __init__(self, queue: QueueSpec | None, tensor_parallel_rank: int) -> None:
        self._store = RowStore(open_queue(queue), tensor_parallel_rank)
        self._upload = RowUpload()
        self._findings: dict[str, Corruption] = {}

    def __len__(self) -> int:
        return len(self._store)

    def feed(self, request_id: str, feed: RowsFeed) -> None:
        try:
            self._store.add(request_id, feed)
        except ValueError as error:
            self._refuse(request_id, error)

    def _refuse(self, request_id: str, error: Exception) -> None:
        self._store.refuse(request_id)
        self._upload.rows_changed()
        self._findings[request_id] = Corruption("row_sequence", str(error))

    @property
    def has_findings(self) -> bool:
        return bool(self._findings)

    def take_findings(self) -> dict[str, Corruption]:
        """What was found since the last call, by request."""
        findings, self._findings = self._findings, {}
        return findings

    def announce(self, request_id: str, rows_input: RowsInput) -> None:
        self._store.announce(request_id, rows_input.num_replaced)

    def remove(self, request_id: str) -> None:
        self._store.remove(request_id)
        self._findings.pop(request_id, None)
        self._upload.rows_changed()  # another request may get its places

    def prompt_positions(self, request_id: str, prompt_length: int) -> tuple[torch.Tensor, int] | None:
        """M-RoPE positions `[3, prompt_length]` and delta that came with the rows, or None."""
        return self._store.sequence_positions(request_id, prompt_length)

    def apply(self, embeds: torch.Tensor, batch: StepBatch) -> None:
        """Overlay in place; `embeds` is `[>= num_tokens, width]`, the buffer that the model reads."""
        of_requests = slots = self._store.slots.of_batch(batch.request_ids)
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
        try:
            index = self._store.locate(slots, positions)
        except MissingRowError as error:
            self._refuse(batch.request_ids[int((of_requests == error.slot).argmax())], error)
            self.apply(embeds, batch)
            return
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
        type and on its device. None if a request is not fed, or a row replaces the embedding or has not come."""
        slots = self._store.slots.of_batch(request_ids)
        if slots.min() < 0 or (positions < self._store.num_replaced[slots]).any():
            return None
        try:
            index = self._store.locate(slots, positions.astype(np.int64))
        except MissingRowError as error:
            self._refuse(request_ids[int((slots == error.slot).argmax())], error)
            return None
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
