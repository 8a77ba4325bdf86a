"""The events of an answer as the routes want them: with heartbeats, bounded, and ended by the server's abort.

An answer has one generation, or one per choice.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from omni_server.api.state import ServerState
from omni_server.api.unsent import AnswerQueue, ChoiceEvent
from omni_server.errors import OmniError
from omni_server.generation import Generation
from omni_server.types import Finished, OmniEvent


async def follow(
    generation: Generation, state: ServerState, heartbeat_s: float | None = None
) -> AsyncGenerator[OmniEvent | None, None]:
    """`follow_choices` for an answer with one generation, without the index."""
    async with aclosing(follow_choices([generation], state, heartbeat_s)) as events:
        async for event in events:
            yield None if event is None else event[1]


async def follow_choices(
    generations: Sequence[Generation], state: ServerState, heartbeat_s: float | None = None
) -> AsyncGenerator[ChoiceEvent | None, None]:
    """Yields events until every generation has had its `Finished`, and None after every `heartbeat_s`
    seconds of silence.

    Raises what a generation raises, `ServerState.abort_error` when the server aborts, and
    `InvalidRequestError` when more events wait than `ServerState.unsent` allows: the generations are closed
    then, even if the reader does not ask for another event. Otherwise whoever submitted them closes them.
    """
    queue = AnswerQueue(state.unsent, generations[0].request_id)
    state.on_abort.add(queue.wake)
    pumps = [asyncio.create_task(_pump(*choice, queue)) for choice in enumerate(generations)]
    try:
        num_running = len(generations)
        while num_running:
            item = await queue.get(heartbeat_s)
            if state.abort_error is not None:  # checked first, or a generation that never pauses would go on
                raise state.abort_error
            if isinstance(item, BaseException):
                raise item
            if item is not None and isinstance(item[1], Finished):
                num_running -= 1
            yield item
    finally:
        state.on_abort.discard(queue.wake)
        queue.close()
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(index: int, generation: Generation, queue: AnswerQueue) -> None:
    is_finished = False
    try:
        async for event in generation:
            queue.put(index, event)
            if queue.is_dropped:
                await generation.aclose()
                return
            is_finished = isinstance(event, Finished)
    except Exception as error:  # noqa: BLE001 - the reader raises it, behind all events
        queue.put_error(error)
    else:
        if not is_finished:
            queue.put_error(OmniError("The generation ended before it was finished."))
