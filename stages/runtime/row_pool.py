"""Host memory for rows: one array of equally wide rows that is handed out in pages and grows in place."""

import mmap
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

PAGE_ROWS = 32
_FIRST_PAGES = 64


class RowPool:
    """Rows are opaque bytes. Memory that was used once stays with the pool; a page is handed out as it was left."""

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self._page_bytes = PAGE_ROWS * row_bytes
        self._free: list[int] = []
        self._num_pages = 0
        # Private and anonymous: growing moves no bytes (mremap), and the kernel backs a page when it is first written.
        self._map = mmap.mmap(-1, _FIRST_PAGES * self._page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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
