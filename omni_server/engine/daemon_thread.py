"""Blocking calls that nobody has to wait for: not whoever gives up on them, nor the interpreter at its end."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

NAME = "blocking call"
"""Of the threads."""


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """The result of `function()`, or what it raises. Cancelling the call leaves the thread to itself."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # T may include None

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as exc:  # noqa: BLE001 - it is raised where the result is awaited
            error = exc
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=NAME, daemon=True).start()
    return await future
