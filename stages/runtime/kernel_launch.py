"""What our Triton kernels have in common on the host: which GPUs they are made for, and cheap launches."""

from collections.abc import Hashable
from typing import Any

import torch

_SHARED_MEMORY_BYTES = 160 * 1024
"""The largest tiles of the decoding kernels take as much of a multiprocessor's shared memory. A100, H100,
H200 and B200 have it; on GPUs with less, vLLM's own kernels run."""


def fits_decoding_kernels(device: torch.device) -> bool:
    """Whether the kernels of a decoding step are made for this device."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor >= _SHARED_MEMORY_BYTES


class CachedLaunch:
    """Launches one Triton kernel on one device at little cost to the host.

    At each launch Triton determines anew which compiled variant the arguments select: by their types, by
    which integers are 1 or multiples of 16, by which addresses are aligned. That takes the host longer than a
    small kernel runs. Here the compiled variant is kept for all arguments that agree in these properties.
    """

    def __init__(self, kernel: Any) -> None:
        """`kernel`: a function decorated with `triton.jit`."""
        self._kernel = kernel
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, grid: tuple[int, int, int], *args: torch.Tensor | float, **options: int) -> None:
        """`args`: all arguments of the kernel in order, constants included; numbers should take few different
        values. `options`: Triton's own, such as `num_warps`."""
        kinds = [
            (arg.dtype, arg.data_ptr() % 16 == 0) if isinstance(arg, torch.Tensor) else (type(arg), arg)
            for arg in args
        ]
        key = (*kinds, *options.items())
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*args)
            return
        compiled = self._kernel[grid](*args, **options)
        if compiled is not None:  # it is None in Triton's interpreter
            self._compiled[key] = compiled
