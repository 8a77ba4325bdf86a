"""Which launches of a kernel may use what an earlier one has compiled, and which GPUs have room for
kernels."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stages.runtime.kernel_launch import CachedLaunch, fits_decoding_kernels


class Kernel:
    """Stands for what `triton.jit` makes, and for what that compiles."""

    def __init__(self, *, is_interpreted: bool = False) -> None:
        self.is_interpreted = is_interpreted
        self.found: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, int]]] = []
        self.launched: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def find(*args: Any, **options: int) -> Any:
            self.found.append((grid, args, options))
            return None if self.is_interpreted else Compiled(self)

        return find


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.kernel.launched.append((grid, args))


def aligned() -> torch.Tensor:
    return torch.zeros(64)


def test_the_first_launch_is_tritons_and_others_like_it_are_of_the_compiled_kernel() -> None:
    kernel = Kernel()
    launch = CachedLaunch(kernel)
    first, second = aligned(), aligned()
    launch((1, 1, 1), first, 3, 128, num_warps=4)
    launch((7, 2, 1), second, 3, 128, num_warps=4)
    [(grid, (x, *numbers), options)] = kernel.found
    assert (grid, numbers, options) == ((1, 1, 1), [3, 128], {"num_warps": 4})
    assert x is first
    [(grid, (x, *numbers))] = kernel.launched
    assert (grid, numbers) == ((7, 2, 1), [3, 128])
    assert x is second


@pytest.mark.parametrize(
    "other",
    [
        lambda: ((aligned().half(), 3), {"num_warps": 4}),
        lambda: ((aligned()[1:], 3), {"num_warps": 4}),
        lambda: ((aligned(), 1), {"num_warps": 4}),
        lambda: ((aligned(), 3.0), {"num_warps": 4}),
        lambda: ((aligned(), 3), {"num_warps": 8}),
    ],
    ids=["type", "alignment", "number", "type of a number", "option"],
)
def test_what_asks_for_another_compiled_kernel_goes_through_triton(other: Callable[[], Any]) -> None:
    kernel = Kernel()
    launch = CachedLaunch(kernel)
    launch((1, 1, 1), aligned(), 3, num_warps=4)
    args, options = other()
    launch((1, 1, 1), *args, **options)
    assert len(kernel.found) == 2
    assert kernel.launched == []


def test_in_the_interpreter_every_launch_is_tritons() -> None:
    kernel = Kernel(is_interpreted=True)
    launch = CachedLaunch(kernel)
    for _ in range(2):
        launch((1, 1, 1), aligned())
    assert len(kernel.found) == 2


@pytest.mark.parametrize(
    ("shared_kib", "fits"),
    [(64, False), (100, False), (164, True), (228, True)],
    ids=["T4", "L40S", "A100", "H100"],
)
def test_gpus_run_the_kernels_if_a_block_can_have_the_largest_tile(
    shared_kib: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest tile has 113 KiB. A multiprocessor's shared memory is from the CUDA programming guide."""
    properties = SimpleNamespace(shared_memory_per_multiprocessor=shared_kib * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert fits_decoding_kernels(torch.device("cuda")) == fits
    assert not fits_decoding_kernels(torch.device("cpu"))
