"""The consumer's own copy of the rows of all its requests, in host memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from omni_server.protocol.rows import (
    ComposedSegment,
    InlineBlock,
    RowDtype,
    RowsFeed,
    RowsInput,
    RowsPayload,
    Segment,
    SharedBlock,
    TextSegment,
)
from omni_server.transport.slab_queue import SlabQueue
from stages.runtime.row_producer import DTYPE_NAMES, ROW_DTYPES

Row = npt.NDArray[np.uint8]
"""The bytes of one row, `[row_bytes]`. Never modified while referenced."""


class MissingRowError(IndexError):
    """A row that is needed has not arrived."""


@dataclass
class StoredRows:
    """The rows of one request."""

    num_replaced: int = 0
    """`RowsInput.num_replaced`"""
    rows: list[Row] = field(default_factory=list)  # by absolute position
    tail: list[Row] = field(default_factory=list)
    is_final: bool = False
    positions: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """M-RoPE positions of the rows from an index on, and that of text that follows them: float32 `[3, n + 1]`
    for n rows, in order."""

    def row(self, position: int) -> Row:
        """`at` for one position."""
        return self.rows[position] if position < len(self.rows) else self.at(position, 1)[0]

    def at(self, first: int, count: int) -> list[Row]:
        """Returns the rows of `count` positions from `first`. The tail follows the last row.

        Raises `MissingRowError` if a row has not arrived.
        """
        found = self.rows[first : first + count]
        if len(found) < count:
            if not (self.is_final and self.tail):
                raise MissingRowError(
                    f"the row of position {first + len(found)} has not come ({len(self.rows)} have)"
                )
            behind = range(first + len(found) - len(self.rows), first + count - len(self.rows))
            found += [self.tail[min(index, len(self.tail) - 1)] for index in behind]
        return found

    def prompt_positions(self, prompt_length: int) -> torch.Tensor | None:
        """M-RoPE positions of this stage's prompt, float32 `[3, prompt_length]`, or None if none were
        sent."""
        if not self.positions:
            return None
        positions = torch.arange(prompt_length, dtype=torch.float32).repeat(3, 1)
        for first, given in self.positions:
            behind = first + given.shape[1] - 1
            positions[:, first:behind] = given[:, :-1]
            positions[:, behind:] = torch.arange(prompt_length - behind) + given[:, -1:]
        return positions


class RowStore:
    """Rows by request and absolute position, kept until the request ends: a preempted request needs them
    again. Not thread-safe; each worker has its own.
    """

    def __init__(self, queues: Sequence[SlabQueue], consumer: int) -> None:
        """`consumer` is the tensor-parallel rank. It releases its own references into the `queues`, which are
        those of the producer's replicas."""
        self._queues = queues
        self._consumer = consumer
        self._requests: dict[str, StoredRows] = {}
        self._refused: set[str] = set()
        self._format: tuple[int, RowDtype] | None = None
        self._table: npt.NDArray[np.uint8] | None = None  # [vocabulary, row_bytes]
        self.compose_rows: Callable[[bytes], torch.Tensor] | None = None
        """`stages.runtime.embeddings_in.ComposesRows.compose_rows`"""

    def use_table(self, rows: torch.Tensor) -> None:
        """Look up the rows of text in `rows`, `[vocabulary, width]` on the CPU, which must not change. Rows
        that arrive are converted to its dtype."""
        self._table = rows.contiguous().view(torch.uint8).numpy()
        self._format = rows.shape[1], DTYPE_NAMES[rows.dtype]

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: str) -> StoredRows | None:
        return self._requests.get(request_id)

    @property
    def dtype(self) -> torch.dtype:
        """Requires a table, or that a row has arrived."""
        assert self._format is not None
        return ROW_DTYPES[self._format[1]]

    def announce(self, request_id: str, rows_input: RowsInput) -> None:
        if request_id not in self._refused:
            self._requests.setdefault(request_id, StoredRows()).num_replaced = rows_input.num_replaced

    def add(self, request_id: str, feed: RowsFeed) -> None:
        """Copy the feed's rows and release its reference; look up those of text.

        Raises `ValueError` for a stale reference, a gap in the positions, rows of another width or dtype, a
        text id without a row, rows that cannot be composed, or a final length above the number of rows.
        """
        block = None if feed.payload is None else feed.payload.block
        if isinstance(block, SharedBlock):
            if not 0 <= block.queue < len(self._queues):
                raise ValueError(f"rows came through queue {block.queue}, which this stage does not have")
            queue = self._queues[block.queue]
            queue.check(block)
            try:
                self._take(request_id, feed, np.frombuffer(queue.slot_buffer(block.slot), np.uint8))
            finally:
                queue.finish(block, self._consumer)
        else:
            data = block.data if isinstance(block, InlineBlock) else b""
            self._take(request_id, feed, np.frombuffer(data, np.uint8))
        if feed.final_length is not None and request_id not in self._refused:
            request = self._requests.setdefault(request_id, StoredRows())
            if feed.final_length > len(request.rows):
                raise ValueError(f"received {len(request.rows)} of {feed.final_length} rows")
            del request.rows[feed.final_length :]
            request.is_final = True

    def refuse(self, request_id: str) -> None:
        """Drop the request's rows, and ignore any rows that arrive for it later."""
        self.remove(request_id)
        self._refused.add(request_id)

    def remove(self, request_id: str) -> None:
        self._refused.discard(request_id)
        self._requests.pop(request_id, None)

    def _take(self, request_id: str, feed: RowsFeed, block: npt.NDArray[np.uint8]) -> None:
        """`block`: the bytes of the payload."""
        payload = feed.payload
        if request_id in self._refused or not (feed.segments or feed.tail_ids):
            return
        request = self._requests.setdefault(request_id, StoredRows())
        positions, num_located = None, 0
        if payload is not None:
            self._check_format(payload)
            if payload.positions_offset is not None and payload.num_positions:
                flat = np.frombuffer(block, np.float32, 3 * payload.num_positions, payload.positions_offset)
                positions = torch.from_numpy(flat.reshape(3, -1).copy())
            if payload.tail is not None and not request.tail:
                request.tail = self._copied(payload, payload.tail, block)
        if feed.tail_ids and not request.tail:
            request.tail = self._looked_up(feed.tail_ids)
        for segment in feed.segments:
            first = len(request.rows)
            if segment.first_position != first:
                raise ValueError(f"rows from position {segment.first_position}, but {first} rows are there")
            if isinstance(segment, TextSegment):
                request.rows += self._looked_up(segment.token_ids)
                continue
            if isinstance(segment, ComposedSegment):
                request.rows += self._composed(segment)
                continue
            assert payload is not None
            request.rows += self._copied(payload, segment, block)
            if positions is not None and num_located < positions.shape[1]:
                located = positions[:, num_located : num_located + segment.num_rows + 1]
                request.positions.append((first, located))
                num_located += located.shape[1]

    def _check_format(self, payload: RowsPayload) -> None:
        self._format = self._format or (payload.width, payload.dtype)
        width, dtype = self._format
        if payload.width != width or (payload.dtype != dtype and self._table is None):
            raise ValueError(f"rows of {payload.width} {payload.dtype} after rows of {self._format}")

    def _copied(self, payload: RowsPayload, segment: Segment, block: npt.NDArray[np.uint8]) -> list[Row]:
        row_bytes = payload.width * ROW_DTYPES[payload.dtype].itemsize
        end = segment.offset + segment.num_rows * row_bytes
        if not 0 <= segment.offset <= end <= len(block):
            raise ValueError(f"{segment.num_rows} rows from byte {segment.offset} on of {len(block)}")
        rows = block[segment.offset : end].reshape(segment.num_rows, row_bytes).copy()
        if ROW_DTYPES[payload.dtype] != self.dtype:
            converted = torch.from_numpy(rows).view(ROW_DTYPES[payload.dtype]).to(self.dtype)
            rows = converted.view(torch.uint8).numpy()
        return list(rows)

    def _composed(self, segment: ComposedSegment) -> list[Row]:
        if self.compose_rows is None:
            raise ValueError("rows are to be composed, but this stage's model composes none")
        rows = self.compose_rows(segment.data)
        if len(rows) != segment.num_rows:
            raise ValueError(f"{len(rows)} rows were composed instead of {segment.num_rows}")
        return list(rows.contiguous().view(torch.uint8).numpy())

    def _looked_up(self, token_ids: tuple[int, ...]) -> list[Row]:
        table = self._table
        if table is None:
            raise ValueError("text ids came, but this stage has no rows of text")
        unknown = [token_id for token_id in token_ids if not 0 <= token_id < len(table)]
        if unknown:
            raise ValueError(f"text id {unknown[0]} has no row among {len(table)}")
        return [table[token_id] for token_id in token_ids]
