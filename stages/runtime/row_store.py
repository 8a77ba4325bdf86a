"""The consumer's own copy of the rows of one request."""

import torch

from omni_server.protocol.rows import InlineBlock, RowsFeed, RowsPayload, Segment
from omni_server.transport.slab_queue import SlabQueue

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class RowStore:
    """Rows by absolute position, kept until the request ends: after a preemption they are needed again.

    Not thread safe; lives in one worker.
    """

    def __init__(self) -> None:
        self.num_replaced = 0
        self.num_rows = 0
        self.final_length: int | None = None
        self.position_delta = 0
        self._rows: torch.Tensor | None = None  # [capacity, width]
        self._tail: torch.Tensor | None = None  # [num_tail, width]
        self._positions: list[torch.Tensor] = []  # each [3, n]

    def add(self, feed: RowsFeed, queue: SlabQueue | None, consumer: int) -> None:
        """Copy what the feed refers to and end the reference for this `consumer` (tensor-parallel rank).

        Raises `ValueError` for a stale reference or a gap in the positions.
        """
        payload = feed.payload
        if payload is not None:
            block = payload.block
            if isinstance(block, InlineBlock):
                self._copy(payload, memoryview(bytearray(block.data)))  # torch wants it writable
            else:
                if queue is None:
                    raise ValueError("rows came through shared memory, but this stage has no input queue")
                queue.check(block)
                self._copy(payload, queue.slot_buffer(block.slot))
                queue.finish(block, consumer)
        if feed.final_length is not None:
            self.final_length = feed.final_length

    def _copy(self, payload: RowsPayload, block: memoryview) -> None:
        dtype = _DTYPES[payload.dtype]

        def view(segment: Segment) -> torch.Tensor:
            count = segment.num_rows * payload.width
            flat = torch.frombuffer(block, dtype=dtype, count=count, offset=segment.offset)
            return flat.view(segment.num_rows, payload.width)

        for segment in payload.segments:
            if segment.first_position != self.num_rows:
                raise ValueError(f"rows from position {segment.first_position}, but {self.num_rows} rows are there")
            end = self.num_rows + segment.num_rows
            self._reserve(end, payload.width, dtype)[self.num_rows : end] = view(segment)
            self.num_rows = end
        if payload.tail is not None:
            self._tail = view(payload.tail).clone()
        if payload.positions_offset is not None and payload.num_positions:
            count = 3 * payload.num_positions
            flat = torch.frombuffer(block, dtype=torch.int32, count=count, offset=payload.positions_offset)
            self._positions.append(flat.view(3, payload.num_positions).long())
            self.position_delta = payload.position_delta

    def _reserve(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Grow geometrically, so that a row at a time costs one copy of each row on average."""
        if self._rows is None or num_rows > len(self._rows):
            grown = torch.empty(max(num_rows, 2 * self.num_rows, 64), width, dtype=dtype)
            if self._rows is not None:
                grown[: self.num_rows] = self._rows[: self.num_rows]
            self._rows = grown
        return self._rows

    def rows(self, first: int, count: int) -> torch.Tensor:
        """Rows of positions `first` .. `first + count - 1`, `[count, width]`; the tail behind the last one.

        Raises `IndexError` for a position whose row has not come.
        """
        length = self.num_rows if self.final_length is None else min(self.num_rows, self.final_length)
        here = max(0, min(first + count, length) - first)
        if here == count:
            assert self._rows is not None
            return self._rows[first : first + count]
        if self.final_length is None or self._tail is None:
            raise IndexError(f"the row of position {first + here} has not come ({self.num_rows} have)")
        behind = torch.arange(first + here, first + count) - length
        tail = self._tail[behind.clamp(max=len(self._tail) - 1)]
        if here == 0:
            return tail
        assert self._rows is not None
        return torch.cat([self._rows[first : first + here], tail])

    def sequence_positions(self, num_positions: int) -> tuple[torch.Tensor, int] | None:
        """M-RoPE positions `[3, num_positions]` and delta of this stage's prompt, or None if none were sent.

        Behind the producer's prompt, positions go on as `index + delta`.
        """
        if not self._positions:
            return None
        known = torch.cat(self._positions, 1)
        missing = torch.arange(known.shape[1], max(num_positions, known.shape[1])) + self.position_delta
        return torch.cat([known, missing.expand(3, -1)], 1)[:, :num_positions], self.position_delta
