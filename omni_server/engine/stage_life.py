"""Whether a stage is up, and how the requests that need it learn that it is not.

A request may wait for a stage in many ways: for a token, for rows, for a place in the schedule, for a thread
that renders its prompt. None of these has to know about engines that die: they all happen inside
`StageLife.needed`.
"""

import asyncio
from types import TracebackType

from omni_server.errors import StageDeadError


class StageLife:
    """Whether one stage is up. Belongs to one event loop."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._reason: str | None = None
        self._inside: set[_Needed] = set()

    @property
    def reason(self) -> str | None:
        """Why the stage is down; None while it is up."""
        return self._reason

    def needed(self) -> "_Needed":
        """For `async with`: when the stage goes down, the block is interrupted and raises `StageDeadError`.
        If the stage is down at its beginning, it raises at once."""
        return _Needed(self)

    def check(self) -> None:
        """Raises `StageDeadError` while the stage is down, to each caller one of its own."""
        if self._reason is not None:
            raise StageDeadError(self._stage, self._reason)

    def enter(self, needed: "_Needed") -> None:
        self._inside.add(needed)

    def leave(self, needed: "_Needed") -> None:
        self._inside.discard(needed)

    def went_down(self, reason: str) -> None:
        """Interrupts everybody who needs the stage."""
        self._reason = reason
        inside, self._inside = self._inside, set()
        for needed in inside:
            needed.interrupt(StageDeadError(self._stage, reason))

    def came_up(self) -> None:
        self._reason = None


class _Needed:
    """As `asyncio.timeout`, with the stage's end in place of a deadline."""

    def __init__(self, life: StageLife) -> None:
        self._life = life
        self._task: asyncio.Task[object] | None = None
        self._num_cancels = 0
        self._error: StageDeadError | None = None

    async def __aenter__(self) -> None:
        self._life.check()
        self._task = asyncio.current_task()
        assert self._task is not None
        self._num_cancels = self._task.cancelling()
        self._life.enter(self)

    def interrupt(self, error: StageDeadError) -> None:
        """The block ends with `error`."""
        assert self._task is not None
        self._error = error
        self._task.cancel()

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._life.leave(self)
        if self._error is None:
            return
        assert self._task is not None
        # Somebody else may have cancelled the task as well: then it stays cancelled.
        if self._task.uncancel() <= self._num_cancels and error_type is asyncio.CancelledError:
            raise self._error from None
