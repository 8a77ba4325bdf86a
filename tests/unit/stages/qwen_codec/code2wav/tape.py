"""What CUDA graphs do, on a CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Records the operations on tensors. A replay repeats them on the same memory, without the Python code
    between them: what that computed from tensors' values or lengths stays as it was."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], Any, dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self._calls:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # not a view of inputs
                    old.copy_(new)


class TapeRecorder:
    """Implements `Record`. Counts recordings and replays."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.replayed: list[int] = []
        """Which recordings, by their number."""

    def __call__(self, work: Callable[[], object]) -> Callable[[], object]:
        number, tape = self.num_recorded, Tape()
        self.num_recorded += 1
        with tape:
            work()

        def replay() -> None:
            self.replayed.append(number)
            tape.replay()

        return replay
