"""The events of all choices of one answer, as they come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from omni_server.api.event_feed import follow
from omni_server.api.state import ServerState
from omni_server.api.unsent import Backlog
from omni_server.errors import InvalidRequestError
from omni_server.generation import Generation
from omni_server.types import Finished, OmniEvent

ChoiceEvent = tuple[int, OmniEvent]
"""Number of the choice, and what happened to it."""


async def follow_choices(
    generations: Sequence[Generation], state: ServerState, heartbeat_s: float | None = None
) -> AsyncGenerator[ChoiceEvent | None, None]:
    """Yields until every choice has had its `Finished`, and None after `heartbeat_s` seconds of silence.

    Raises as `follow` does: if one choice fails, all do. Does not close the generations.
    """
    if len(generations) == 1:
        async with aclosing(follow(generations[0], state, heartbeat_s)) as events:
            async for event in events:
                yield None if event is None else (0, event)
        return
    inbox: asyncio.Queue[ChoiceEvent | BaseException] = asyncio.Queue()

    def drop(error: InvalidRequestError) -> None:
        while not inbox.empty():
            inbox.get_nowait()
        inbox.put_nowait(error)

    backlog = state.unsent.open(generations[0].request_id, drop)

    def put_failure(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            inbox.put_nowait(error)

    tasks = [
        asyncio.create_task(_pump(number, generation, state, inbox, backlog))
        for number, generation in enumerate(generations)
    ]
    for task in tasks:
        task.add_done_callback(put_failure)
    try:
        num_running = len(generations)
        while num_running:
            try:
                item = await asyncio.wait_for(inbox.get(), heartbeat_s)
            except TimeoutError:
                yield None
                continue
            if isinstance(item, BaseException):
                raise item
            backlog.taken(item[1])
            num_running -= isinstance(item[1], Finished)
            yield item
    finally:
        backlog.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int,
    generation: Generation,
    state: ServerState,
    inbox: asyncio.Queue[ChoiceEvent | BaseException],
    backlog: Backlog,
) -> None:
    async with aclosing(follow(generation, state)) as events:
        async for event in events:
            if event is None:
                continue
            backlog.put(event)
            if backlog.error is not None:
                await generation.aclose()
                return
            inbox.put_nowait((index, event))
