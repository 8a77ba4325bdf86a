"""Rows in: puts the rows that another stage sent onto the input embeddings, by absolute position."""

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from omni_server.protocol.rows import RowsFeed, RowsInput
from omni_server.protocol.runtime_config import QueueSpec
from omni_server.transport.slab_queue import SlabQueue
from stages.runtime.batch import StepBatch
from stages.runtime.queue_end import open_queue
from stages.runtime.row_store import RowStore


class RowOverlay:
    """Holds the rows of every request that is fed, from its first feed until it ends.

    One rule covers prefill in chunks, decoding and recomputation after a preemption: at position p the row
    replaces the token embedding if p < `num_replaced` of the request, and is added to it otherwise.
    """

    def __init__(self, queue: QueueSpec | None, tensor_parallel_rank: int) -> None:
        self._queue: SlabQueue | None = open_queue(queue)
        self._rank = tensor_parallel_rank
        self._stores: dict[str, RowStore] = {}

    def __len__(self) -> int:
        return len(self._stores)

    def feed(self, request_id: str, feed: RowsFeed) -> None:
        """Raises `ValueError` for a stale reference or a gap."""
        self._stores.setdefault(request_id, RowStore()).add(feed, self._queue, self._rank)

    def announce(self, request_id: str, rows_input: RowsInput) -> None:
        self._stores.setdefault(request_id, RowStore()).num_replaced = rows_input.num_replaced

    def remove(self, request_id: str) -> None:
        self._stores.pop(request_id, None)

    def prompt_positions(self, request_id: str, prompt_length: int) -> tuple[torch.Tensor, int] | None:
        """M-RoPE positions `[3, prompt_length]` and delta that came with the rows, or None."""
        store = self._stores.get(request_id)
        return None if store is None else store.sequence_positions(prompt_length)

    def apply(self, embeds: torch.Tensor, batch: StepBatch) -> None:
        """Overlay in place; `embeds` is `[num_tokens, width]`, the buffer that the model reads."""
        if not self._stores:
            return
        rows: list[torch.Tensor] = []
        indices: list[int] = []
        replaced: list[bool] = []
        for request_id, first, count, offset in zip(
            batch.request_ids,
            batch.first_positions.tolist(),
            batch.num_tokens.tolist(),
            batch.offsets.tolist(),
            strict=True,
        ):
            store = self._stores.get(request_id)
            if store is None:
                continue
            rows.append(store.rows(first, count))
            indices.extend(range(offset, offset + count))
            replaced.extend(position < store.num_replaced for position in range(first, first + count))
        if not rows:
            return
        index = async_tensor_h2d(indices, embeds.device, torch.int64)
        keep = async_tensor_h2d([not r for r in replaced], embeds.device, torch.bool)
        new = async_tensor_h2d(torch.cat(rows), embeds.device, embeds.dtype)
        embeds[index] = torch.where(keep[:, None], embeds[index] + new, new)
