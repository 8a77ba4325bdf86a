"""Lets callers take turns at the stages.

Without turns, a caller that sends a hundred requests makes everybody wait for all of them. Turns are the start
tags of start-time fair queueing (Goyal, Vin and Cheng, 1996), where every request has the same weight.
"""

from collections import Counter


class Turn:
    """The place of one request among those of all callers."""

    def __init__(self, turns: "CallerTurns", caller: str, number: int) -> None:
        self._turns = turns
        self._caller = caller
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
            self._turns.left(self._caller)


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
