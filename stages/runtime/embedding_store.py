"""The consumer's own copy of the rows of all its requests, in host memory."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from omni_server.protocol.rows import InlineBlock, RowDtype, RowsFeed, RowsInput, RowsPayload, Segment
from omni_server.transport.slab_queue import SlabQueue
from stages.runtime.row_producer import ROW_DTYPES

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
    positions: list[torch.Tensor] = field(default_factory=list)  # each [3, n]
    position_delta: int = 0

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

    def sequence_positions(self, num_positions: int) -> tuple[torch.Tensor, int] | None:
        """M-RoPE positions `[3, num_positions]` and delta of this stage's prompt, or None if none were sent.

        After the producer's prompt, positions continue as `index + delta`.
        """
        if not self.positions:
            return None
        known = torch.cat(self.positions, 1)
        missing = torch.arange(known.shape[1], max(num_positions, known.shape[1])) + self.position_delta
        return torch.cat([known, missing.expand(3, -1)], 1)[:, :num_positions], self.position_delta


class RowStore:
    """Rows by request and absolute position, kept until the request ends: a preempted request needs them
    again. Not thread-safe; each worker has its own.
    """

    def __init__(self, queue: SlabQueue | None, consumer: int) -> None:
        """`consumer` is the tensor-parallel rank. It releases its own references into the `queue`."""
        self._queue = queue
        self._consumer = consumer
        self._requests: dict[str, StoredRows] = {}
        self._refused: set[str] = set()
        self._format: tuple[int, RowDtype] | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: str) -> StoredRows | None:
        return self._requests.get(request_id)

    @property
    def dtype(self) -> torch.dtype:
        """Requires that a row has arrived."""
        assert self._format is not None
        return ROW_DTYPES[self._format[1]]

    def announce(self, request_id: str, rows_input: RowsInput) -> None:
        if request_id not in self._refused:
            self._requests.setdefault(request_id, StoredRows()).num_replaced = rows_input.num_replaced

    def add(self, request_id: str, feed: RowsFeed) -> None:
        """Copy the feed's rows and release its reference.

        Raises `ValueError` for a stale reference, a gap in the positions, rows of another width or dtype, or
        a final length above the number of rows.
        """
        payload = feed.payload
        if payload is not None:
            block = payload.block
            if isinstance(block, InlineBlock):
                self._copy(request_id, payload, np.frombuffer(block.data, np.uint8))
            else:
                if self._queue is None:
                    raise ValueError("rows came through shared memory, but this stage has no input queue")
                self._queue.check(block)
                try:
                    self._copy(
                        request_id, payload, np.frombuffer(self._queue.slot_buffer(block.slot), np.uint8)
                    )
                finally:
                    self._queue.finish(block, self._consumer)
        if feed.final_length is not None and request_id not in self._refused:
            request = self._requests.setdefault(request_id, StoredRows())
            if feed.final_length > len(request.rows):
                raise ValueError(f"{len(request.rows)} rows have come of {feed.final_length}")
            del request.rows[feed.final_length :]
            request.is_final = True

    def refuse(self, request_id: str) -> None:
        """Drop the request's rows, and ignore any rows that arrive for it later."""
        self.remove(request_id)
        self._refused.add(request_id)

    def remove(self, request_id: str) -> None:
        self._refused.discard(request_id)
        self._requests.pop(request_id, None)

    def _copy(self, request_id: str, payload: RowsPayload, block: npt.NDArray[np.uint8]) -> None:
        if request_id in self._refused:
            return
        request = self._requests.setdefault(request_id, StoredRows())
        self._format = self._format or (payload.width, payload.dtype)
        if self._format != (payload.width, payload.dtype):
            raise ValueError(f"rows of {payload.width} {payload.dtype} after rows of {self._format}")
        row_bytes = payload.width * ROW_DTYPES[payload.dtype].itemsize

        def copied(segment: Segment) -> list[Row]:
            end = segment.offset + segment.num_rows * row_bytes
            if not 0 <= segment.offset <= end <= len(block):
                raise ValueError(f"{segment.num_rows} rows from byte {segment.offset} on of {len(block)}")
            return list(block[segment.offset : end].reshape(segment.num_rows, row_bytes).copy())

        for segment in payload.segments:
            first = len(request.rows)
            if segment.first_position != first:
                raise ValueError(f"rows from position {segment.first_position}, but {first} rows are there")
            request.rows += copied(segment)
        if payload.tail is not None and not request.tail:
            request.tail = copied(payload.tail)
        if payload.positions_offset is not None and payload.num_positions:
            flat = np.frombuffer(block, np.int32, 3 * payload.num_positions, payload.positions_offset)
            request.positions.append(torch.from_numpy(flat.reshape(3, -1).astype(np.int64)))
            request.position_delta = payload.position_delta
