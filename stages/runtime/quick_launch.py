"""Launches of Triton kernels that cost the host little."""

from collections.abc import Hashable
from typing import Any

import torch


class QuickLaunch:
    """A Triton kernel, for one device.

    At each launch Triton finds out anew which compiled kernel the arguments ask for: by their types, by which integers
    are 1 or multiples of 16, by which addresses are aligned. That takes the host longer than a small kernel runs. Here
    the compiled kernel is kept for all arguments that are alike in this.
    """

    def __init__(self, kernel: Any) -> None:
        """`kernel`: what `triton.jit` has made."""
        self._kernel = kernel
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, grid: tuple[int, int, int], *args: torch.Tensor | float, **options: int) -> None:
        """`args` are all of the kernel's, constants included, in its order; of numbers there should be few different
        ones. `options` are Triton's own, such as `num_warps`."""
        kinds = [
            (arg.dtype, arg.data_ptr() % 16 == 0) if isinstance(arg, torch.Tensor) else (type(arg), arg) for arg in args
        ]
        key = (*kinds, *options.items())
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*args)
            return
        compiled = self._kernel[grid](*args, **options)
        if compiled is not None:  # as it is in Triton's interpreter
            self._compiled[key] = compiled
