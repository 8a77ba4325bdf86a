"""Lets callers take turns at the stages: a caller that sends a hundred requests does not make all others wait
for all of them.

`FairShareQueue` orders requests, for stages that take them whole, by the start tags of start-time fair
queueing (Goyal, Vin and Cheng, 1996); every request has the same weight. `WindowFairness` orders windows of
speech, which have deadlines."""

import bisect
from collections import defaultdict
from dataclasses import dataclass


class FairShareTicket:
    """The place of one request among those of all callers. `end` must be called."""

    def __init__(self, queue: "FairShareQueue", caller: str, number: int) -> None:
        self._queue = queue
        self.caller = caller
        self.number = number
        """Requests with lower numbers are computed first; equal ones in the order of their arrival."""
        self._has_begun = False
        self._has_ended = False

    def begin(self) -> None:
        """A stage has begun to compute the request. Harmless if that was said before."""
        if not self._has_begun and not self._has_ended:
            self._has_begun = True
            self._queue.begun(self)

    def end(self) -> None:
        """The request has ended, however it did. Harmless if it has ended already."""
        if not self._has_ended:
            self._has_ended = True
            self._queue.left(self)


@dataclass
class _Caller:
    num_open: int = 0
    next: int = 0
    next_after_begun: int = 0
    """The number that follows the greatest which has begun: one that never began does not count."""


class FairShareQueue:
    """Numbers the requests of a caller one after the other, from the greatest number that has begun."""

    def __init__(self) -> None:
        self._begun = 0
        self._callers: defaultdict[str, _Caller] = defaultdict(_Caller)

    def take(self, caller: str) -> FairShareTicket:
        """Returns the next ticket of the caller."""
        state = self._callers[caller]
        number = max(self._begun, state.next)
        state.next = number + 1
        state.num_open += 1
        return FairShareTicket(self, caller, number)

    def begun(self, ticket: FairShareTicket) -> None:
        state = self._callers[ticket.caller]
        state.next_after_begun = max(state.next_after_begun, ticket.number + 1)
        self._begun = max(self._begun, ticket.number)

    def left(self, ticket: FairShareTicket) -> None:
        state = self._callers[ticket.caller]
        state.num_open -= 1
        if not state.num_open:
            state.next = state.next_after_begun
        # A caller without requests is remembered as long as it would be ahead of the others otherwise.
        for name in [n for n, c in self._callers.items() if not c.num_open and c.next <= self._begun]:
            del self._callers[name]


class WindowFairness:
    """Deadlines of the windows that are in a decoder, by caller.

    As long as all are computed in time, a window keeps its deadline. Once those of one caller are overdue, a
    window that another caller sends does not wait for all of them.
    """

    def __init__(self) -> None:
        self._of_caller: defaultdict[str, list[float]] = defaultdict(list)  # ascending

    def enter(self, caller: str, due: float, now: float, *, not_before: float) -> float:
        """Returns the deadline of a window that is sent at `now`.

        It is `due`, unless another caller has overdue windows: the n-th window of a caller then gets the
        deadline of the other's n-th, but none before `not_before`.
        """
        own = self._of_caller[caller]
        place = bisect.bisect_right(own, due)
        for others in self._of_caller.values():
            if others is not own and len(others) > place and others[place] < now:
                due = min(due, max(others[place], not_before))
        bisect.insort(own, due)
        return due

    def leave(self, caller: str, due: float) -> None:
        """The window that got this deadline is no longer in the decoder."""
        own = self._of_caller[caller]
        own.remove(due)
        if not own:
            del self._of_caller[caller]
