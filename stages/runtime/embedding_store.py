"""Embeddings stored: the consumer's own copy of the rows of all its requests, in host memory."""

import mmap
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from omni_server.protocol.rows import InlineBlock, RowDtype, RowsFeed, RowsPayload, Segment
from omni_server.transport.slab_queue import SlabQueue
from stages.runtime.request_slots import RequestSlots, grown
from stages.runtime.slab_layout import ROW_DTYPES

_Ints = npt.NDArray[np.int64]

PAGE_ROWS = 32
_FIRST_PAGES = 64


class MissingRowError(IndexError):
    """A row is needed that has not come, by the request at `slot`."""

    def __init__(self, slot: int, position: int, num_rows: int) -> None:
        super().__init__(f"the row of position {position} has not come ({num_rows} have)")
        self.slot = slot


class RowPool:
    """Host memory for rows, opaque bytes of equal width, handed out in pages. It never shrinks; pages are not
    cleared."""

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self._page_bytes = PAGE_ROWS * row_bytes
        self._free: list[int] = []
        self._num_pages = 0
        # Private and anonymous: growing moves no bytes (mremap), and the kernel backs a page when it is first
        # written.
        self._map = mmap.mmap(
            -1, _FIRST_PAGES * self._page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self.rows = self._view()
        """`[capacity, row_bytes]` uint8. Not to be kept: growing replaces it."""
        self._add_pages()

    def take(self) -> int:
        """A page: rows `page * PAGE_ROWS` to `(page + 1) * PAGE_ROWS - 1` belong to the caller."""
        if not self._free:
            del self.rows  # a view forbids resizing
            self._map.resize(2 * len(self._map))
            self.rows = self._view()
            self._add_pages()
        return self._free.pop()

    def give_back(self, pages: Iterable[int]) -> None:
        self._free.extend(pages)

    @property
    def num_taken(self) -> int:
        return self._num_pages - len(self._free)

    def _view(self) -> npt.NDArray[np.uint8]:
        count = len(self._map) // self._page_bytes * self._page_bytes
        return np.frombuffer(self._map, np.uint8, count).reshape(-1, self.row_bytes)

    def _add_pages(self) -> None:
        num_pages = len(self._map) // self._page_bytes
        self._free.extend(range(num_pages - 1, self._num_pages - 1, -1))  # the lowest is handed out first
        self._num_pages = num_pages


@dataclass
class _Request:
    """State of one request that is not looked up for a whole step at once."""

    slot: int
    num_rows: int = 0
    final_length: int | None = None
    pages: list[int] = field(default_factory=list)
    tail_page: int | None = None
    tail_length: int = 0
    positions: list[torch.Tensor] = field(default_factory=list)  # each [3, n]
    position_delta: int = 0


class RowStore:
    """Rows by request and absolute position, kept until the request ends: after a preemption they are needed
    again.

    Where a row lies is computed for all tokens of a step at once, from arrays with one entry per request
    (its *slot*). Not thread safe; lives in one worker.
    """

    def __init__(self, queue: SlabQueue | None, consumer: int) -> None:
        """`consumer` is the tensor-parallel rank, which ends its own references into the `queue`."""
        self._queue = queue
        self._consumer = consumer
        self._slot_views: dict[int, npt.NDArray[np.uint8]] = {}
        self._requests: dict[str, _Request] = {}
        self._refused: set[str] = set()
        self._pool: RowPool | None = None
        self._format: tuple[int, RowDtype] | None = None
        self.slots = RequestSlots()
        # Per slot:
        self.num_replaced: _Ints = np.zeros(0, np.int64)
        self._length: _Ints = np.zeros(0, np.int64)  # of the sequence: rows that may be used
        self._tail_row: _Ints = np.zeros(0, np.int64)  # in the pool
        self._tail_length: _Ints = np.zeros(0, np.int64)  # 0 until the end is known
        self._pages: _Ints = np.zeros((0, 8), np.int64)  # [num_slots, pages of the longest request]

    def __len__(self) -> int:
        return len(self._requests)

    # -- requests and rows come and go

    def announce(self, request_id: str, num_replaced: int) -> None:
        if request_id in self._refused:
            return
        slot = self._request(request_id).slot
        self.num_replaced[slot] = num_replaced

    def add(self, request_id: str, feed: RowsFeed) -> None:
        """Copy what the feed refers to and end the reference.

        Raises `ValueError` for a stale reference, a gap in the positions, rows of another width or type, or
        fewer rows than the sequence is to have.
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
                    self._copy(request_id, payload, self._slot_bytes(block.slot))
                finally:
                    self._queue.finish(block, self._consumer)
        if request_id in self._refused:
            return
        request = self._request(request_id)
        if feed.final_length is not None:
            if feed.final_length > request.num_rows:
                raise ValueError(f"{request.num_rows} rows have come of {feed.final_length}")
            request.final_length = feed.final_length
        self._set_length(request)

    def refuse(self, request_id: str) -> None:
        """The request is to have no rows any more: what it has is dropped, and what still comes is not
        copied."""
        self.remove(request_id)
        self._refused.add(request_id)

    def remove(self, request_id: str) -> None:
        self._refused.discard(request_id)
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self.slots.remove(request_id)
        if self._pool is not None:
            self._pool.give_back(request.pages)
            if request.tail_page is not None:
                self._pool.give_back([request.tail_page])

    def _request(self, request_id: str) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            slot = self.slots.add(request_id)
            request = self._requests[request_id] = _Request(slot)
            self.num_replaced = grown(self.num_replaced, slot + 1)
            self._length = grown(self._length, slot + 1)
            self._tail_row = grown(self._tail_row, slot + 1)
            self._tail_length = grown(self._tail_length, slot + 1)
            self._pages = grown(self._pages, slot + 1)
            self.num_replaced[slot] = self._length[slot] = self._tail_length[slot] = 0
        return request

    def _slot_bytes(self, slot: int) -> npt.NDArray[np.uint8]:
        view = self._slot_views.get(slot)
        if view is None:
            assert self._queue is not None
            view = self._slot_views[slot] = np.frombuffer(self._queue.slot_buffer(slot), np.uint8)
        return view

    def _set_length(self, request: _Request) -> None:
        slot, length = request.slot, request.num_rows
        if request.final_length is not None:
            length = min(length, request.final_length)
            if request.tail_page is not None:
                self._tail_row[slot] = request.tail_page * PAGE_ROWS
                self._tail_length[slot] = request.tail_length
        self._length[slot] = length

    def _copy(self, request_id: str, payload: RowsPayload, block: npt.NDArray[np.uint8]) -> None:
        if request_id in self._refused:
            return
        request = self._request(request_id)
        pool = self._pool_for(payload.width, payload.dtype)

        def view(segment: Segment) -> npt.NDArray[np.uint8]:
            num_bytes = segment.num_rows * pool.row_bytes
            return block[segment.offset : segment.offset + num_bytes].reshape(
                segment.num_rows, pool.row_bytes
            )

        for segment in payload.segments:
            first = request.num_rows
            if segment.first_position != first:
                raise ValueError(f"rows from position {segment.first_position}, but {first} rows are there")
            if not 0 <= segment.offset <= len(block) - segment.num_rows * pool.row_bytes:
                raise ValueError(f"{segment.num_rows} rows from byte {segment.offset} on of {len(block)}")
            end = first + segment.num_rows
            while len(request.pages) * PAGE_ROWS < end:
                self._add_page(request)
            if segment.num_rows == 1:  # as it is while the producer decodes
                row = request.pages[first // PAGE_ROWS] * PAGE_ROWS + first % PAGE_ROWS
                pool.rows[row] = block[segment.offset : segment.offset + pool.row_bytes]
            else:
                pool.rows[self._located(request.slot, np.arange(first, end))] = view(segment)
            request.num_rows = end
        if payload.tail is not None and request.tail_page is None:
            self._add_tail(request, view(payload.tail))
        if payload.positions_offset is not None and payload.num_positions:
            flat = np.frombuffer(block, np.int32, 3 * payload.num_positions, payload.positions_offset)
            request.positions.append(torch.from_numpy(flat.reshape(3, -1).astype(np.int64)))
            request.position_delta = payload.position_delta

    @property
    def _rows_pool(self) -> RowPool:
        assert self._pool is not None
        return self._pool

    def _pool_for(self, width: int, dtype: RowDtype) -> RowPool:
        if self._pool is None:
            self._format = width, dtype
            self._pool = RowPool(width * ROW_DTYPES[dtype].itemsize)
        elif self._format != (width, dtype):
            raise ValueError(f"rows of {width} {dtype} after rows of {self._format}")
        return self._pool

    def _add_page(self, request: _Request) -> None:
        index = len(request.pages)
        if index == self._pages.shape[1]:
            self._pages = np.concatenate([self._pages, np.zeros_like(self._pages)], axis=1)
        self._pages[request.slot, index] = page = self._rows_pool.take()
        request.pages.append(page)

    def _add_tail(self, request: _Request, rows: npt.NDArray[np.uint8]) -> None:
        if len(rows) > PAGE_ROWS:
            raise ValueError(f"a tail of {len(rows)} rows; at most {PAGE_ROWS} are supported")
        request.tail_page, request.tail_length = self._rows_pool.take(), len(rows)
        first = request.tail_page * PAGE_ROWS
        self._rows_pool.rows[first : first + len(rows)] = rows

    # -- steps

    def _located(self, slots: _Ints | int, positions: _Ints) -> _Ints:
        return self._pages[slots, positions // PAGE_ROWS] * PAGE_ROWS + positions % PAGE_ROWS

    def locate(self, slots: _Ints, positions: _Ints) -> _Ints:
        """Where the rows of these positions lie in `rows`, `[num_tokens]` each; behind a request's last row,
        its tail.

        Raises `MissingRowError` for a position whose row has not come.
        """
        if len(slots) == 1:
            return np.array([self._place(int(slots[0]), int(positions[0]))])
        behind = positions - self._length[slots]
        if behind.max() < 0:
            return self._located(slots, positions)
        is_behind = behind >= 0
        last = self._tail_length[slots] - 1
        if (missing := is_behind & (last < 0)).any():
            token = int(missing.argmax())
            slot = int(slots[token])
            raise MissingRowError(slot, int(positions[token]), int(self._length[slot]))
        tail = self._tail_row[slots] + np.minimum(behind, last)
        return np.where(is_behind, tail, self._located(slots, np.where(is_behind, 0, positions)))

    def _place(self, slot: int, position: int) -> int:
        """`locate` for one token, where arrays cost more than they save."""
        behind = position - int(self._length[slot])
        if behind < 0:
            return int(self._pages[slot, position // PAGE_ROWS]) * PAGE_ROWS + position % PAGE_ROWS
        last = int(self._tail_length[slot]) - 1
        if last < 0:
            raise MissingRowError(slot, position, position - behind)
        return int(self._tail_row[slot]) + min(behind, last)

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        """All rows of all requests, `[capacity, bytes of a row]`; valid until the next `add`."""
        return self._rows_pool.rows

    @property
    def dtype(self) -> torch.dtype:
        assert self._format is not None
        return ROW_DTYPES[self._format[1]]

    # -- one request

    def num_rows(self, request_id: str) -> int:
        return self._requests[request_id].num_rows

    @property
    def num_pages(self) -> int:
        """Pages in use; 0 when there are no requests."""
        return 0 if self._pool is None else self._pool.num_taken

    def sequence_positions(self, request_id: str, num_positions: int) -> tuple[torch.Tensor, int] | None:
        """M-RoPE positions `[3, num_positions]` and delta of this stage's prompt, or None if none were sent.

        Behind the producer's prompt, positions go on as `index + delta`.
        """
        request = self._requests.get(request_id)
        if request is None or not request.positions:
            return None
        known = torch.cat(request.positions, 1)
        missing = torch.arange(known.shape[1], max(num_positions, known.shape[1])) + request.position_delta
        return torch.cat([known, missing.expand(3, -1)], 1)[:, :num_positions], request.position_delta
