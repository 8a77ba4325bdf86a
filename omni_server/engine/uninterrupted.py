"""Work that is done to its end whatever happens to the task that asked for it."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


async def uninterrupted(work: Coroutine[object, object, T]) -> T:
    """The result of `work`, which must end by itself. A cancellation that comes meanwhile is raised after the end, in
    place of the result; an error of `work` is raised in any case."""
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
