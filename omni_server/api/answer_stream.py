"""The events of an answer as the routes want them: with heartbeats, bounded, and ended by the server's abort.

An answer has one generation, or one per choice.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from omni_server.api.state import ServerState
from omni_server.api.unsent import UnsentBudget
from omni_server.errors import InvalidRequestError, OmniError
from omni_server.generation import Generation, Generator
from omni_server.types import Finished, OmniEvent, OmniRequest

ChoiceEvent = tuple[int, OmniEvent]
"""Index of the choice, and what happened to it."""


async def submit_all(generator: Generator, requests: Sequence[OmniRequest]) -> list[Generation]:
    """Submits all choices, or none."""
    generations: list[Generation] = []
    try:
        for request in requests:
            generations.append(await generator.submit(request))
    except BaseException:
        await close_all(generations)
        raise
    return generations


async def close_all(generations: Sequence[Generation]) -> None:
    for generation in generations:
        await generation.aclose()


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
    inbox = _Inbox(heartbeat_s, state.unsent, generations[0].request_id)
    tasks = [asyncio.create_task(_watch_abort(state, inbox))]
    for index, generation in enumerate(generations):
        pump = asyncio.create_task(_pump(index, generation, inbox))
        pump.add_done_callback(inbox.put_failure)
        tasks.append(pump)
    try:
        num_running = len(generations)
        while num_running:
            item = await inbox.get()
            if state.abort_error is not None:  # checked first, or a generation that never pauses would go on
                raise state.abort_error
            if isinstance(item, BaseException):
                raise item
            if item is not None and isinstance(item[1], Finished):
                num_running -= 1
            yield item
    finally:
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


async def _watch_abort(state: ServerState, inbox: "_Inbox") -> None:
    await state.aborted.wait()
    inbox.put(None)


class _Inbox:
    """What the generations have produced and the reader has not taken yet.

    It costs one future per pause. `asyncio.wait` around each event would cost a task, two callbacks
    and a timer.
    """

    def __init__(self, heartbeat_s: float | None, unsent: UnsentBudget, answer_id: str) -> None:
        self._backlog = unsent.open(answer_id, self._drop)
        self._items: deque[ChoiceEvent | BaseException | None] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        if heartbeat_s is not None:
            self._timer = self._loop.call_later(heartbeat_s, self._beat, heartbeat_s)

    @property
    def is_dropped(self) -> bool:
        return self._backlog.error is not None

    def put_event(self, index: int, event: OmniEvent) -> None:
        self._backlog.put(event)
        if not self.is_dropped:
            self.put((index, event))

    def put(self, item: ChoiceEvent | BaseException | None) -> None:
        self._last = self._loop.time()
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def put_failure(self, pump: asyncio.Task[None]) -> None:
        """Behind all events: why there are no more. Nothing if the generation is finished."""
        error = None if pump.cancelled() else pump.exception()
        if error is not None and not self.is_dropped:
            self.put(error)

    async def get(self) -> ChoiceEvent | BaseException | None:
        """The next item; None for a heartbeat."""
        while not self._items:
            self._waiter = self._loop.create_future()
            await self._waiter
        item = self._items.popleft()
        if isinstance(item, tuple):
            self._backlog.taken(item[1])
        return item

    def close(self) -> None:
        self._backlog.close()
        if self._timer is not None:
            self._timer.cancel()

    def _drop(self, error: InvalidRequestError) -> None:
        self._items.clear()
        self.put(error)

    def _beat(self, heartbeat_s: float) -> None:
        """One timer that is set anew when it fires, not with each event."""
        if self._last + heartbeat_s <= self._loop.time():
            if self._items:  # the reader is late: no heartbeats pile up
                self._last = self._loop.time()
            else:
                self.put(None)
        self._timer = self._loop.call_at(self._last + heartbeat_s, self._beat, heartbeat_s)
