"""Embeddings in: rows that another stage sent are laid over this stage's input embeddings, by absolute
position.

`FeedTracker` is the scheduler's half: it knows which rows have come. `RowOverlay` is the worker's half.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from omni_server.protocol.corruption import Corruption
from omni_server.protocol.rows import AddressedFeed, RowsFeed, RowsInput, SharedBlock
from omni_server.protocol.runtime_config import QueueSpec
from omni_server.transport.slab_queue import SlabQueue
from stages.runtime.embedding_store import MissingRowError, RowStore
from stages.runtime.stage_step import StepBatch, open_queue

# -- the scheduler's half


@dataclass
class _Fed:
    """How many rows of one request have come."""

    num_rows: int = 0
    num_released: int | None = None
    is_final: bool = False

    is_broken: bool = False
    """Its rows cannot be right; it is to be ended."""

    def take(self, feed: RowsFeed) -> str | None:
        """Count the rows of a feed. If they are not the next ones, nothing is counted, and what is wrong is
        returned."""
        end = self.num_rows
        if feed.payload is not None:
            if not feed.payload.segments:
                return "a message without rows"
            for segment in feed.payload.segments:
                if segment.first_position != end:
                    return f"rows from position {segment.first_position}, but {end} rows have come"
                end += segment.num_rows
        if feed.final_length is not None and feed.final_length > end:
            return f"{end} rows have come of {feed.final_length}"
        self.num_rows = end
        self.num_released = feed.num_released
        self.is_final |= feed.final_length is not None
        return None

    def has_row(self, position: int) -> bool:
        if self.is_final:
            return True
        limit = self.num_rows if self.num_released is None else min(self.num_rows, self.num_released)
        return position < limit


class FeedTracker:
    """The feeds of a stage's requests, from their arrival until the next step takes them to the workers."""

    def __init__(self, queue: SlabQueue | None) -> None:
        """`queue`: this stage's input queue, where references of dropped feeds are ended."""
        self._queue = queue
        self._fed: dict[str, _Fed] = {}
        self._pending: list[AddressedFeed] = []

    def __len__(self) -> int:
        """Requests that are fed."""
        return len(self._fed)

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def announce(self, request_id: str) -> None:
        """The request is to be fed."""
        self._fed[request_id] = _Fed()

    def take(self, request_id: str, feed: RowsFeed) -> str | None:
        """Returns what is wrong, if the request's rows cannot be right from now on. Feeds of requests that
        have ended, or whose rows were wrong before, are dropped."""
        fed = self._fed.get(request_id)
        if fed is None or fed.is_broken:  # vLLM would start a new request from a late feed
            self._drop(feed)
            return None
        problem = fed.take(feed)
        if problem is not None:
            fed.is_broken = True
            self._drop(feed)
            return problem
        self._pending.append((request_id, feed))
        return None

    def take_pending(self) -> tuple[AddressedFeed, ...]:
        """For the workers, with the next step."""
        pending, self._pending = self._pending, []
        return tuple(pending)

    def has_row(self, request_id: str, position: int) -> bool:
        """Whether the request may compute this position: its row has come, or it needs none."""
        fed = self._fed.get(request_id)
        return fed is None or fed.has_row(position)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        if self._fed.pop(request_id, None) is None:
            return
        for owner, feed in self._pending:
            if owner == request_id:
                self._drop(feed)
        self._pending = [(owner, feed) for owner, feed in self._pending if owner != request_id]

    def _drop(self, feed: RowsFeed) -> None:
        if feed.payload is not None and isinstance(feed.payload.block, SharedBlock):
            assert self._queue is not None
            if self._queue.is_open(feed.payload.block):  # else its slot may have been used again
                self._queue.finish_all(feed.payload.block)


# -- the worker's half


class RowOverlay:
    """Holds the rows of every request that is fed, from its first feed until it ends.

    One rule covers prefill in chunks, decoding and recomputation after a preemption: at position p the row
    replaces the token embedding if p < `num_replaced` of the request, and is added to it otherwise.

    A request whose rows cannot be right has none from then on, so that the other requests of its steps are
    not affected. Its own results are then meaningless, and `take_findings` reports it.
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
        """Rows of these positions, one of each request, to be added by the caller: `[num_requests, width]`,
        of `embeds`' type and on its device. None if a request is not fed, or a row replaces the embedding or
        has not come."""
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
    """In place, `[n, width]` each; `is_added` `[n]`: whether the row is added, or replaces the embedding."""
    if is_added.all():
        embeds.add_(rows)
    elif not is_added.any():
        embeds.copy_(rows)
    else:
        added = async_tensor_h2d(is_added, embeds.device)
        embeds.copy_(torch.where(added[:, None], embeds + rows, rows))


@dataclass
class _Buffer:
    host: torch.Tensor  # [num_rows, row_bytes] uint8, page-locked
    device: torch.Tensor  # the same on the device
    copied: torch.cuda.Event


class RowUpload:
    """Two page-locked buffers in turn: the rows of a step are gathered into one while the copy of the step
    before may still read the other. vLLM's async scheduling is at most that far ahead, so waiting is the
    exception."""

    def __init__(self) -> None:
        self._buffers: list[_Buffer | None] = [None, None]
        self._last: tuple[npt.NDArray[np.int64], torch.Tensor] | None = None

    def rows_changed(self) -> None:
        """Rows that were uploaded may have been replaced since."""
        self._last = None

    def upload(
        self, rows: npt.NDArray[np.uint8], index: npt.NDArray[np.int64], device: torch.device
    ) -> torch.Tensor:
        """`rows[index]` on the device, `[len(index), row_bytes]` uint8.

        On a GPU the current stream may read the result until the call after the next one. The same rows as
        in the call before are not uploaded again: after the last row of a text, every step has the same.
        """
        if self._last is None or not np.array_equal(index, self._last[0]):
            self._last = index, self._uploaded(rows, index, device)
        return self._last[1]

    def _uploaded(
        self, rows: npt.NDArray[np.uint8], index: npt.NDArray[np.int64], device: torch.device
    ) -> torch.Tensor:
        if device.type != "cuda":
            return torch.from_numpy(rows.take(index, 0)).to(device)
        buffer = self._next_buffer(len(index), rows.shape[1], device)
        buffer.copied.synchronize()
        # mode="clip": numpy copies straight into `out`; the indices are known to be in range.
        rows.take(index, 0, out=buffer.host.numpy()[: len(index)], mode="clip")
        result = buffer.device[: len(index)]
        result.copy_(buffer.host[: len(index)], non_blocking=True)
        buffer.copied.record()
        return result

    def _next_buffer(self, num_rows: int, row_bytes: int, device: torch.device) -> _Buffer:
        buffer = self._buffers.pop(0)
        if buffer is None or len(buffer.host) < num_rows:
            if buffer is not None:
                buffer.copied.synchronize()
            capacity = max(64, 1 << (num_rows - 1).bit_length())
            host = torch.empty(capacity, row_bytes, dtype=torch.uint8, pin_memory=True)
            buffer = _Buffer(host, torch.empty_like(host, device=device), torch.cuda.Event(blocking=True))
        self._buffers.append(buffer)
        return buffer
