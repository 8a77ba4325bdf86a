"""What happens to work when the task that waits for it is cancelled: it is completed, or continues in the
background."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

THREAD_NAME = "blocking call"


async def uninterrupted(work: Coroutine[object, object, T]) -> T:
    """The result of `work`, which must end by itself. A cancellation that comes meanwhile is raised after the
    end, in place of the result; an error of `work` is raised in any case."""
    task = asyncio.ensure_future(work)
    was_cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            was_cancelled = True
    result = task.result()
    if was_cancelled:
        raise asyncio.CancelledError
    return result


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """The result of the blocking `function()`, or what it raises. If the call is cancelled, the thread goes
    on by itself; unlike one of `asyncio.to_thread`, it keeps neither the event loop nor the interpreter from
    ending."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from now on, it is not cancelled with the call

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as exc:  # noqa: BLE001 - it is raised where the result is awaited
            future.set_exception(exc)

    threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
    return await asyncio.wrap_future(future)
