"""Numbers for requests, so that what is kept per request lies in arrays and a whole step is looked up at
once."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

UNKNOWN = -1


class RequestSlots:
    """Each known request has a *slot*: a row of its owner's arrays, from `add` until `remove`."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._capacity = 0
        self._last_ids: list[str] | None = None  # of the last `of_batch`
        self._last_slots: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, request_id: str) -> int | None:
        return self._slots.get(request_id)

    def add(self, request_id: str) -> int:
        """A slot, 0 or above, for a request that has none yet."""
        if not self._free:
            self._free.append(self._capacity)
            self._capacity += 1
        slot = self._slots[request_id] = self._free.pop()
        self._last_ids = None
        return slot

    def remove(self, request_id: str) -> int | None:
        """The slot that is free from now on, or None for an unknown request."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)
            self._last_ids = None
        return slot

    def of_batch(self, request_ids: Sequence[str]) -> npt.NDArray[np.int64]:
        """Slots of a step's requests, `[num_requests]`, `UNKNOWN` where a request has none; not to be written
        to.

        Consecutive steps mostly have the same requests in the same order: the same array is then returned.
        """
        if request_ids != self._last_ids:
            get = self._slots.get
            self._last_slots = np.array([get(request_id, UNKNOWN) for request_id in request_ids], np.int64)
            self._last_ids = list(request_ids)
        return self._last_slots


def grown(array: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    """`array` with at least `length` rows; new rows are 0."""
    if length <= len(array):
        return array
    larger = np.zeros((max(length, 2 * len(array)), *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger
