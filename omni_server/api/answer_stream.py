"""The events of an answer as the routes want them: with heartbeats, bounded, and ended by the server's abort.

An answer has one generation, or one per choice.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress

from omni_server.api.state import ServerState
from omni_server.api.unsent import UnsentBudget
from omni_server.errors import InvalidRequestError, OmniError
from omni_server.generation import Generation
from omni_server.types import Finished, OmniEvent

ChoiceEvent = tuple[int, OmniEvent]
"""Index of the choice, and what happened to it."""


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
    inbox = _Inbox(state.unsent, generations[0].request_id)
    state.on_abort.add(inbox.wake)
    tasks = []
    for index, generation in enumerate(generations):
        pump = asyncio.create_task(_pump(index, generation, inbox))
        pump.add_done_callback(inbox.put_failure)
        tasks.append(pump)
    try:
        num_running = len(generations)
        while num_running:
            item = await inbox.get(heartbeat_s)
            if state.abort_error is not None:  # checked first, or a generation that never pauses would go on
                raise state.abort_error
            if isinstance(item, BaseException):
                raise item
            if item is not None and isinstance(item[1], Finished):
                num_running -= 1
            yield item
    finally:
        state.on_abort.discard(inbox.wake)
        inbox.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(index: int, generation: Generation, inbox: "_Inbox") -> None:
    is_finished = False
    async for event in generation:
        inbox.put_event(index, event)
        if inbox.is_dropped:
            await generation.aclose()
            return
        is_finished = isinstance(event, Finished)
    if not is_finished:
        raise OmniError("The generation ended before it was finished.")


class _Inbox:
    """What the generations have produced and the reader has not taken yet."""

    def __init__(self, unsent: UnsentBudget, answer_id: str) -> None:
        self._backlog = unsent.open(answer_id, self._drop)
        self._items: deque[ChoiceEvent | BaseException] = deque()
        self._is_woken = asyncio.Event()

    @property
    def is_dropped(self) -> bool:
        return self._backlog.error is not None

    def put_event(self, index: int, event: OmniEvent) -> None:
        self._backlog.put(event)
        if not self.is_dropped:
            self._put((index, event))

    def put_failure(self, pump: asyncio.Task[None]) -> None:
        """Behind all events: why there are no more. Nothing if the generation is finished."""
        error = None if pump.cancelled() else pump.exception()
        if error is not None and not self.is_dropped:
            self._put(error)

    def wake(self) -> None:
        """Ends the wait for the next item."""
        self._is_woken.set()

    async def get(self, heartbeat_s: float | None) -> ChoiceEvent | BaseException | None:
        """The next item; None after `heartbeat_s` seconds without one, and after `wake`."""
        if not self._items:
            with suppress(TimeoutError):
                async with asyncio.timeout(heartbeat_s):
                    await self._is_woken.wait()
        self._is_woken.clear()
        if not self._items:
            return None
        item = self._items.popleft()
        if isinstance(item, tuple):
            self._backlog.taken(item[1])
        return item

    def close(self) -> None:
        self._backlog.close()

    def _put(self, item: ChoiceEvent | BaseException) -> None:
        self._items.append(item)
        self._is_woken.set()

    def _drop(self, error: InvalidRequestError) -> None:
        self._items.clear()
        self._put(error)
