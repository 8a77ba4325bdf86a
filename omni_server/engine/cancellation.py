"""Work that outlives the cancellation of the task that waits for it: it is completed, or continues in the
background."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

THREAD_NAME = "blocking call"

_NO_THREAD_S = 0.1
"""Between two attempts to start a thread."""


async def uninterrupted(work: Coroutine[object, object, T]) -> T:
    """Returns the result of `work`, which must end by itself. A cancellation in the meantime is raised after
    the end, in place of the result. An error of `work` is always raised."""
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


async def cancel_and_wait(*tasks: asyncio.Task[None]) -> None:
    """Cancels the tasks, and returns when they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Returns the result of the blocking `function()`, or raises its error. If the call is cancelled, the
    thread continues. Unlike a thread of `asyncio.to_thread`, it keeps neither the event loop nor the
    interpreter from ending, and waits for no other call. While the machine has no thread to give, waits for
    one."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from now on, it is not cancelled with the call

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as exc:  # noqa: BLE001 - it is raised where the result is awaited
            future.set_exception(exc)

    while True:
        try:
            threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
            break
        except RuntimeError:  # documented for a second start only; raised for want of a thread as well
            await asyncio.sleep(_NO_THREAD_S)
    return await asyncio.wrap_future(future)
