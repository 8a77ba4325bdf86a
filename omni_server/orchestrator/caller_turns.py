"""Lets callers take turns at the stages.

Without turns, a caller that sends a hundred requests makes everybody wait for all of them. Turns are the start
tags of start-time fair queueing (Goyal, Vin and Cheng, 1996), where every request has the same weight.
"""

import bisect
from collections import Counter, defaultdict


class Turn:
    """The place of one request among those of all callers."""

    def __init__(self, turns: "CallerTurns", caller: str, number: int) -> None:
        self._turns = turns
        self.caller = caller
        self.number = number
        """Requests with lower numbers are computed first; equal ones in the order of their arrival."""
        self._has_ended = False

    def begin(self) -> None:
        """A stage has begun to compute the request."""
        self._turns.begun(self.number)

    def end(self) -> None:
        """The request has ended, however it did. Harmless if it has ended already."""
        if not self._has_ended:
            self._has_ended = True
            self._turns.left(self.caller)


class CallerTurns:
    """Numbers the requests of a caller one after the other, from the greatest number that has begun."""

    def __init__(self) -> None:
        self._begun = 0
        self._next: dict[str, int] = {}
        self._num_open: Counter[str] = Counter()

    def take(self, caller: str) -> Turn:
        """Returns the next turn of the caller. `Turn.end` must follow."""
        number = max(self._begun, self._next.get(caller, 0))
        self._next[caller] = number + 1
        self._num_open[caller] += 1
        return Turn(self, caller, number)

    def begun(self, number: int) -> None:
        self._begun = max(self._begun, number)

    def left(self, caller: str) -> None:
        self._num_open[caller] -= 1
        if not self._num_open[caller]:
            del self._num_open[caller], self._next[caller]


class WindowTurns:
    """Deadlines of the windows that are in a decoder, by caller.

    As long as all are computed in time, a window keeps its deadline. If those of one caller are overdue, the
    windows of other callers do not wait for all of them.
    """

    def __init__(self) -> None:
        self._of_caller: defaultdict[str, list[float]] = defaultdict(list)  # ascending

    def enter(self, caller: str, due: float, now: float) -> float:
        """Returns the deadline of a window that is sent `now`: `due`, or that of another caller's overdue window
        if as many windows of its caller precede it."""
        own = self._of_caller[caller]
        place = bisect.bisect_right(own, due)
        for others in self._of_caller.values():
            if others is not own and len(others) > place and others[place] < now:
                due = min(due, others[place])
        bisect.insort(own, due)
        return due

    def leave(self, caller: str, due: float) -> None:
        """The window that got this deadline is no longer in the decoder."""
        own = self._of_caller[caller]
        own.remove(due)
        if not own:
            del self._of_caller[caller]
