"""The events of one generation, as the routes want them: with heartbeats, bounded, and ended by the server's abort."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from omni_server.api.state import ServerState
from omni_server.api.unsent import UnsentBudget
from omni_server.errors import InvalidRequestError, OmniError
from omni_server.generation import Generation
from omni_server.types import Finished, OmniEvent


async def follow(
    generation: Generation, state: ServerState, heartbeat_s: float | None = None
) -> AsyncGenerator[OmniEvent | None, None]:
    """Yields each event, `Finished` as the last one, and None after every `heartbeat_s` seconds of silence.

    Raises what the generation raises, `ServerState.abort_error` when the server aborts, and `InvalidRequestError` when
    more events wait than `ServerState.unsent` allows: the generation is closed then, however long the reader takes to
    ask for its next event. Otherwise whoever submitted it closes it.
    """
    inbox = _Inbox(heartbeat_s, state.unsent, generation.request_id)
    pump = asyncio.create_task(_pump(generation, inbox))
    pump.add_done_callback(inbox.put_end)
    watch = asyncio.create_task(_watch(state, inbox))
    try:
        while True:
            event = await inbox.get()
            if state.abort_error is not None:  # first, or a generation that never pauses would go on
                raise state.abort_error
            if isinstance(event, BaseException):
                raise event
            yield event
            if isinstance(event, Finished):
                return
    finally:
        inbox.close()
        pump.cancel()
        watch.cancel()
        await asyncio.gather(pump, watch, return_exceptions=True)


async def _pump(generation: Generation, inbox: "_Inbox") -> None:
    async for event in generation:
        inbox.put_event(event)
        if inbox.is_dropped:
            await generation.aclose()
            return


async def _watch(state: ServerState, inbox: "_Inbox") -> None:
    await state.aborted.wait()
    inbox.put(None)


class _Inbox:
    """Costs one future per pause. `asyncio.wait` around each event would cost a task, two callbacks and a timer."""

    def __init__(self, heartbeat_s: float | None, unsent: UnsentBudget, answer_id: str) -> None:
        self._backlog = unsent.open(answer_id, self._drop)
        self._items: deque[OmniEvent | BaseException | None] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        if heartbeat_s is not None:
            self._timer = self._loop.call_later(heartbeat_s, self._beat, heartbeat_s)

    @property
    def is_dropped(self) -> bool:
        return self._backlog.error is not None

    def put_event(self, event: OmniEvent) -> None:
        self._backlog.put(event)
        if not self.is_dropped:
            self.put(event)

    def put(self, item: OmniEvent | BaseException | None) -> None:
        self._last = self._loop.time()
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def put_end(self, pump: asyncio.Task[None]) -> None:
        """Behind all events: why there are no more."""
        if not (pump.cancelled() or self.is_dropped):
            self.put(pump.exception() or OmniError("The generation ended before it was finished."))

    async def get(self) -> OmniEvent | BaseException | None:
        """The next item; None for a heartbeat."""
        while not self._items:
            self._waiter = self._loop.create_future()
            await self._waiter
        item = self._items.popleft()
        if item is not None and not isinstance(item, BaseException):
            self._backlog.taken(item)
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
            if self._items:  # it is the reader who is late: no heartbeats pile up for it
                self._last = self._loop.time()
            else:
                self.put(None)
        self._timer = self._loop.call_at(self._last + heartbeat_s, self._beat, heartbeat_s)
