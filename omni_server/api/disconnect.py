"""Work that ends when the client leaves."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

Result = TypeVar("Result")


async def until_disconnect(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Awaits `work`, and cancels it when the client disconnects; raises `ClientDisconnect` then.

    The body must have been read. Where `work` returns all the same, its result is returned: it may hold something that
    its receiver has to release. It is done by the calling task: in one of its own, every request of a crowd would wait
    for its turn once more.
    """
    worker = asyncio.current_task()
    assert worker is not None
    num_cancels = worker.cancelling()
    has_left = is_over = False

    def left(watching: asyncio.Task[None]) -> None:
        nonlocal has_left
        if watching.cancelled():
            return
        watching.exception()  # is nobody's, but must have been seen
        if not is_over:  # a callback that has been scheduled comes even if it has been removed meanwhile
            has_left = True
            worker.cancel()

    watching = asyncio.create_task(_disconnected(receive))
    watching.add_done_callback(left)
    try:
        return await work
    except asyncio.CancelledError:
        if has_left and worker.cancelling() == num_cancels + 1:  # nobody else wants it to end
            raise ClientDisconnect from None
        raise
    finally:
        is_over = True
        watching.cancel()
        if has_left:
            worker.uncancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
