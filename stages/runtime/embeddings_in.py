"""Embeddings in: lays rows sent by another stage over this stage's input embeddings, by absolute position.

`FeedTracker` is the scheduler's half: it tracks which rows have arrived. `RowOverlay` is the worker's half.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from omni_server.protocol.corruption import Corruption
from omni_server.protocol.rows import AddressedFeed, RowsFeed
from omni_server.protocol.runtime_config import QueueSpec
from omni_server.transport.slab_queue import SlabQueue
from stages.runtime.embedding_store import MissingRowError, Row, RowStore
from stages.runtime.fractional_positions import with_delta
from stages.runtime.stage_step import StepBatch, open_queues

# -- the scheduler's half


@dataclass
class _Fed:
    """Counts the received rows of one request."""

    num_rows: int = 0
    num_released: int | None = None
    is_final: bool = False

    def take(self, feed: RowsFeed) -> str | None:
        """Count the rows of a feed. If they are not the next ones, counts nothing and returns an error
        message."""
        end = self.num_rows
        if feed.payload is not None and not feed.payload.segments:
            return "a message without rows"
        for segment in feed.segments:
            if segment.first_position != end:
                return f"rows from position {segment.first_position}, but {end} rows were received"
            end += segment.num_rows
        if feed.final_length is not None and feed.final_length > end:
            return f"received {end} of {feed.final_length} rows"
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
    """Holds the feeds of a stage's requests from arrival until the next step sends them to the workers."""

    def __init__(self, queues: Sequence[SlabQueue]) -> None:
        """`queues`: this stage's input queues, used to release the references of dropped feeds."""
        self._queues = queues
        self._fed: dict[str, _Fed] = {}
        self._pending: list[AddressedFeed] = []

    def __len__(self) -> int:
        return len(self._fed)

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def announce(self, request_id: str) -> None:
        self._fed[request_id] = _Fed()

    def take(self, request_id: str, feed: RowsFeed) -> str | None:
        """Queue a feed. Returns an error message if it makes the request's rows invalid. Drops feeds of
        requests that have ended or whose rows were already invalid."""
        fed = self._fed.get(request_id)
        # vLLM would treat a late feed as a new request.
        problem = None if fed is None else fed.take(feed)
        if fed is None or problem is not None:
            self._drop(feed)
            self.forget(request_id)
        else:
            self._pending.append((request_id, feed))
        return problem

    def take_pending(self) -> tuple[AddressedFeed, ...]:
        """Take the feeds for the next step."""
        pending, self._pending = self._pending, []
        return tuple(pending)

    def has_row(self, request_id: str, position: int) -> bool:
        """Whether the request may compute this position: its row has arrived or it needs none."""
        fed = self._fed.get(request_id)
        return fed is None or fed.has_row(position)

    def forget(self, request_id: str) -> None:
        if self._fed.pop(request_id, None) is None:
            return
        for owner, feed in self._pending:
            if owner == request_id:
                self._drop(feed)
        self._pending = [(owner, feed) for owner, feed in self._pending if owner != request_id]

    def _drop(self, feed: RowsFeed) -> None:
        if (block := feed.shared_block) is not None:
            queue = self._queues[block.queue]
            if queue.is_open(block):  # otherwise its slot may have been reused
                queue.finish_all(block)


# -- the worker's half


@runtime_checkable
class HasRowTable(Protocol):
    """The model of a stage that gets text as ids (`omni_server.config.pipeline.Embeddings.text_ids`)."""

    def row_table(self) -> torch.Tensor:
        """Returns the rows of all text tokens, by id: `[vocabulary, width]` on the CPU. Called once, on every
        rank, when the weights have been loaded."""
        ...


@runtime_checkable
class ComposesRows(Protocol):
    """The model of a stage that gets rows as `omni_server.protocol.rows.ComposedSegment`."""

    def compose_rows(self, data: bytes) -> torch.Tensor:
        """Returns the rows of a segment, `[num_rows, width]` in the row table's dtype on the CPU. Called on
        every rank. Raises `ValueError` for data that names what does not exist."""
        ...


class RowOverlay(RowStore):
    """Holds the rows of every fed request, from its first feed until it ends.

    One rule covers chunked prefill, decode and recomputation after preemption: at position p the row
    replaces the token embedding if p is below the request's `num_replaced`, and is added to it otherwise.

    A request with invalid rows loses all of them, so that the other requests in its steps are not affected.
    Its own results are then meaningless, and `take_findings` reports it.
    """

    def __init__(self, queues: Sequence[QueueSpec], tensor_parallel_rank: int) -> None:
        super().__init__(open_queues(queues), tensor_parallel_rank)
        self._upload = RowUpload()
        self._findings: dict[str, Corruption] = {}

    def feed(self, request_id: str, feed: RowsFeed) -> None:
        try:
            self.add(request_id, feed)
        except ValueError as error:
            self._report(request_id, error)

    def _report(self, request_id: str, error: Exception) -> None:
        self.refuse(request_id)
        self._findings[request_id] = Corruption("row_sequence", str(error))

    @property
    def has_findings(self) -> bool:
        return bool(self._findings)

    def take_findings(self) -> dict[str, Corruption]:
        """The findings since the last call, by request."""
        findings, self._findings = self._findings, {}
        return findings

    def remove(self, request_id: str) -> None:
        super().remove(request_id)
        self._findings.pop(request_id, None)

    def prompt_positions(self, request_id: str, prompt_length: int) -> tuple[torch.Tensor, int] | None:
        """Packed M-RoPE positions `[3, prompt_length]` and delta sent with the rows, or None."""
        request = self.get(request_id)
        positions = None if request is None else request.prompt_positions(prompt_length)
        return None if positions is None else with_delta(positions)

    def apply(self, embeds: torch.Tensor, batch: StepBatch) -> None:
        """Overlay in place. `embeds` `[>= num_tokens, width]` is the buffer that the model reads."""
        rows: list[Row] = []
        tokens: list[int] = []  # index of each row in the flat batch
        is_added: list[bool] = []
        for request_id, first, count, offset in batch.parts():
            request = self.get(request_id)
            if request is None:
                continue
            try:
                rows += request.at(first, count)
            except MissingRowError as error:
                self._report(request_id, error)
                continue
            tokens += range(offset, offset + count)
            is_added += [position >= request.num_replaced for position in range(first, first + count)]
        if not rows:
            return
        uploaded = self._uploaded(rows, embeds)
        if len(rows) == batch.total_tokens:
            _lay_over(embeds[: len(rows)], uploaded, is_added)
        else:
            where = async_tensor_h2d(tokens, embeds.device)
            picked = embeds[where]
            _lay_over(picked, uploaded, is_added)
            embeds[where] = picked

    def added_rows(
        self, request_ids: list[str], positions: npt.NDArray[np.signedinteger[Any]], embeds: torch.Tensor
    ) -> torch.Tensor | None:
        """Returns the rows that the caller must add, one position per request: `[num_requests, width]`, with
        `embeds`' dtype and device. Returns None if a request is not fed, or if a row replaces the embedding
        or has not arrived."""
        rows: list[Row] = []
        for request_id, position in zip(request_ids, positions.tolist(), strict=True):
            request = self.get(request_id)
            if request is None or position < request.num_replaced:
                return None
            try:
                rows.append(request.row(position))
            except MissingRowError as error:
                self._report(request_id, error)
                return None
        return self._uploaded(rows, embeds)

    def _uploaded(self, rows: list[Row], embeds: torch.Tensor) -> torch.Tensor:
        """`[len(rows), width]`, with `embeds`' dtype and device."""
        return self._upload.upload(rows, embeds.device).view(self.dtype).to(embeds.dtype)


def _lay_over(embeds: torch.Tensor, rows: torch.Tensor, is_added: list[bool]) -> None:
    """Works in place; both are `[n, width]`. `is_added` `[n]`: add the row, else replace the embedding."""
    if all(is_added):
        embeds.add_(rows)
    elif not any(is_added):
        embeds.copy_(rows)
    else:
        added = async_tensor_h2d(is_added, embeds.device)
        embeds.copy_(torch.where(added[:, None], embeds + rows, rows))


class RowUpload:
    """Copies the rows of a step to the device and caches the last ones."""

    def __init__(self) -> None:
        self._last: tuple[list[Row], torch.Tensor] | None = None

    def upload(self, rows: list[Row], device: torch.device) -> torch.Tensor:
        """Returns `[len(rows), row_bytes]` uint8 on the device.

        Does not upload the same rows twice in a row: after the last row of a text, all steps use the same
        ones.
        """
        last = self._last
        if last is None or len(last[0]) != len(rows) or not all(map(is_, last[0], rows)):
            # torch reuses page-locked memory only after the copy from it has finished.
            host = torch.empty(len(rows), len(rows[0]), dtype=torch.uint8, pin_memory=device.type == "cuda")
            np.concatenate(rows, out=host.numpy().reshape(-1))
            self._last = last = rows, host.to(device, non_blocking=True)
        return last[1]
