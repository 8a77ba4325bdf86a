"""Launches of our Triton kernels, noted instead of made: which compiled variants they need."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stages.runtime.kernel_launch import CachedLaunch

_TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


@dataclass(frozen=True)
class Launch:
    kernel: Any
    args: tuple[torch.Tensor | float, ...]
    options: dict[str, int]

    def constant(self, name: str) -> int:
        return int(self.args[self.kernel.arg_names.index(name)])

    def variant(self) -> tuple[object, ...]:
        """Equal for two launches if the second one compiles nothing: see `CachedLaunch`."""
        return (self.kernel, *map(self._kind, self.kernel.params, self.args), *self.options.items())

    def _kind(self, param: Any, arg: torch.Tensor | float) -> object:
        if isinstance(arg, torch.Tensor):
            return arg.dtype, _is_aligned(arg)
        if param.is_constexpr:
            return arg
        if isinstance(arg, float) or param.do_not_specialize:
            return type(arg)
        return arg == 1, _is_aligned(arg)

    def compiled(self, compute_capability: int) -> Any:
        """By Triton, without a GPU."""
        pairs = list(enumerate(zip(self.kernel.params, self.args, strict=True)))
        constants = {(i,): arg for i, (param, arg) in pairs if param.is_constexpr}
        signature = {
            param.name: "constexpr"
            if param.is_constexpr
            else _TYPES[arg.dtype]
            if isinstance(arg, torch.Tensor)
            else "fp32"
            if isinstance(arg, float)
            else "i32"
            for _, (param, arg) in pairs
        }
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, (param, arg) in pairs
            if signature[param.name] not in ("constexpr", "fp32")
            and not param.do_not_specialize
            and _is_aligned(arg)
        }
        source = ASTSource(self.kernel, signature, constants, aligned)
        target = GPUTarget("cuda", compute_capability, 32)
        return triton.compile(source, target, {**self.options, "enable_fp_fusion": True})


def _is_aligned(arg: torch.Tensor | float) -> bool:
    return (arg.data_ptr() if isinstance(arg, torch.Tensor) else arg) % 16 == 0


@contextmanager
def noted_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Results are left as they were, but ids are 0."""
    launches: list[Launch] = []

    def note(
        launch: CachedLaunch, grid: tuple[int, int, int], *args: torch.Tensor | float, **options: int
    ) -> None:
        launches.append(Launch(launch.kernel, args, options))
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.dtype == torch.int64:
                arg.zero_()

    with monkeypatch.context() as context:
        context.setattr(CachedLaunch, "__call__", note)
        yield launches
