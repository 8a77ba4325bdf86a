"""The events of one generation, as the routes want them: with heartbeats, and ended by the server's abort."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from omni_server.api.state import ServerState
from omni_server.errors import OmniError
from omni_server.generation import Generation
from omni_server.types import Finished, OmniEvent


async def follow(
    generation: Generation, state: ServerState, heartbeat_s: float | None = None
) -> AsyncGenerator[OmniEvent | None, None]:
    """Yields each event, `Finished` as the last one, and None after every `heartbeat_s` seconds of silence.

    Raises what the generation raises, and `ServerState.abort_error` when the server aborts. Does not close the
    generation: whoever submitted it does.
    """
    events = aiter(generation)
    aborted = asyncio.create_task(state.aborted.wait())
    step: asyncio.Task[OmniEvent | None] | None = None
    try:
        while True:
            if step is None:
                step = asyncio.create_task(_next(events))
            await asyncio.wait({step, aborted}, timeout=heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
            if aborted.done():  # first, or a generation that never pauses would go on
                assert state.abort_error is not None
                raise state.abort_error
            if step.done():
                event = step.result()
                if event is None:
                    raise OmniError("The generation ended before it was finished.")
                yield event
                if isinstance(event, Finished):
                    return
                step = None
            else:
                yield None
    finally:
        tasks = [task for task in (step, aborted) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _next(events: AsyncIterator[OmniEvent]) -> OmniEvent | None:
    return await anext(events, None)
