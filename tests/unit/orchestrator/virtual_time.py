"""An event loop whose clock jumps to the next timer: seconds pass in no time, and always in the same
order."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Nothing ever comes from outside."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("every task waits for another one")
        self.now += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The result of `work` on a loop whose `time()` starts at 0."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work())


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test on such a loop."""

    @wraps(test)
    def run_test(*arguments: Any, **options: Any) -> None:
        run(lambda: test(*arguments, **options))

    return run_test


def clock() -> float:
    """The time of the running loop."""
    return asyncio.get_running_loop().time()
