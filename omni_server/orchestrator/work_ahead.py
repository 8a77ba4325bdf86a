"""Streams that are far ahead of their listeners step back while others need code2wav.

A step of code2wav cannot be interrupted. In what order waiting windows are computed is decided by their
deadlines; but a step that is filled up with windows that nobody needs yet is a longer one, and whoever
arrives meanwhile waits longer for the next. So windows beyond a stream's cap are kept out of the queue as
long as there is other work.
"""

import asyncio
from collections.abc import Callable

NUM_FILLING = 2
"""Windows of streams beyond the cap go in while fewer than this many are there: one that runs and one that
waits, so that the device does not idle between them. A single one is enough work for a step."""


class WorkAheadGate:
    """Counts the windows in code2wav. One for all streams of a server."""

    def __init__(self, max_ahead_s: float | None, clock: Callable[[], float]) -> None:
        self._max_ahead_s = max_ahead_s
        self._clock = clock
        self._num_inside = 0
        self._waiting: dict[asyncio.Future[None], float] = {}  # when due

    @property
    def num_inside(self) -> int:
        return self._num_inside

    @property
    def num_waiting(self) -> int:
        """Windows that are kept out, at most one of each stream."""
        return len(self._waiting)

    async def enter(self, due: float) -> None:
        """Returns when a window that is to be played at `due` (of the gate's clock) may be sent; `leave` must
        follow.

        Immediately, if it is due within the cap or little else is there; else as soon as one of both is the
        case, the window that is due first before the others. A cancelled call has not entered.
        """
        if self._max_ahead_s is None or self._num_inside < NUM_FILLING:
            self._num_inside += 1
            return
        ahead_s = due - self._clock() - self._max_ahead_s
        if ahead_s <= 0:
            self._num_inside += 1
            return
        loop = asyncio.get_running_loop()
        entered: asyncio.Future[None] = loop.create_future()
        self._waiting[entered] = due
        timer = loop.call_later(ahead_s, self._admit, entered)
        try:
            await entered
        except asyncio.CancelledError:
            self._waiting.pop(entered, None)
            if not entered.cancelled():  # admitted, but it will not be sent
                self.leave()
            raise
        finally:
            timer.cancel()

    def leave(self) -> None:
        """The window has been computed, or never will be."""
        self._num_inside -= 1
        while self._waiting and self._num_inside < NUM_FILLING:
            self._admit(min(self._waiting, key=self._waiting.__getitem__))

    def _admit(self, entered: asyncio.Future[None]) -> None:
        # Its timer may come after another admission, and either after its task was cancelled.
        if self._waiting.pop(entered, None) is not None and not entered.done():
            self._num_inside += 1
            entered.set_result(None)
