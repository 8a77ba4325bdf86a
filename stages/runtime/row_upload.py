"""Rows on their way from host memory to the device, without waiting for it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass
class _Buffer:
    host: torch.Tensor  # [num_rows, row_bytes] uint8, page-locked
    device: torch.Tensor  # the same on the device
    copied: torch.cuda.Event


class RowUpload:
    """Two page-locked buffers in turn: the rows of a step are gathered into one while the copy of the step before may
    still read the other. vLLM's async scheduling is at most that far ahead, so waiting is the exception."""

    def __init__(self) -> None:
        self._buffers: list[_Buffer | None] = [None, None]
        self._last: tuple[npt.NDArray[np.int64], torch.Tensor] | None = None

    def rows_changed(self) -> None:
        """What was uploaded may have been replaced."""
        self._last = None

    def upload(self, rows: npt.NDArray[np.uint8], index: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
        """`rows[index]` on the device, `[len(index), row_bytes]` uint8.

        On a GPU the result may be read by the current stream until the next but one call. What the call before has
        uploaded is not uploaded again: behind the last row of a text, each step has the same.
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
