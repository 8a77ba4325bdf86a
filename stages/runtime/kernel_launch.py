"""Host code shared by our Triton kernels: a check for supported GPUs, and cheap launches."""

from collections.abc import Hashable
from typing import Any

import torch

_SHARED_MEMORY_BYTES = 160 * 1024
"""Shared memory per multiprocessor that the largest tiles of the decode kernels need. A100, H100, H200 and
B200 have it; GPUs with less run vLLM's own kernels."""


def fits_decoding_kernels(device: torch.device) -> bool:
    """Whether the decode kernels support this device."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor >= _SHARED_MEMORY_BYTES


class CachedLaunch:
    """Launches one Triton kernel on one device at little cost to the host.

    At each launch, Triton determines again which compiled variant the arguments select: by their types, by
    which integers are 1 or multiples of 16, and by which addresses are aligned. That takes the host longer
    than a small kernel runs. This class caches the variant by argument types, numbers and alignment.
    """

    def __init__(self, kernel: Any) -> None:
        """`kernel`: a function decorated with `triton.jit`."""
        self.kernel = kernel
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, grid: tuple[int, int, int], *args: torch.Tensor | float, **options: int) -> None:
        """`args`: all kernel arguments in order, including constants; numbers should have few distinct
        values. `options`: Triton's launch options, such as `num_warps`."""
        kinds = [
            (arg.dtype, arg.data_ptr() % 16 == 0) if isinstance(arg, torch.Tensor) else (type(arg), arg)
            for arg in args
        ]
        key = (*kinds, *options.items())
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*args)
            return
        compiled = self.kernel[grid](*args, **options)
        if compiled is not None:  # None in Triton's interpreter
            self._compiled[key] = compiled
