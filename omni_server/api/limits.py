"""Limits on what is accepted, checked before a request's body is read."""

import math
import time
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from omni_server.api.errors import error_response
from omni_server.api.request_record import ANONYMOUS, current_request, path_of
from omni_server.errors import InvalidRequestError, OverloadedError, RateLimitError
from omni_server.metrics.server_metrics import ServerMetrics

MAX_RETRY_AFTER_S = 5
_WEIGHT = 0.1
"""Of the latest request in the mean duration."""


class Admission:
    """Counts the requests and sessions that generate. Belongs to one event loop."""

    def __init__(
        self,
        metrics: ServerMetrics,
        *,
        max_queue: int,
        max_per_caller: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """0 is no limit; callers without a key have none of their own."""
        self._metrics = metrics
        self._max_queue = max_queue
        self._max_per_caller = max_per_caller
        self._clock = clock
        self._num_in_flight = 0
        self._of_caller: Counter[str] = Counter()
        self._mean_s = 1.0
        metrics.limit.set(max_queue)

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    def check_room(self) -> None:
        """Raises `OverloadedError` if the next request would be refused."""
        if 0 < self._max_queue <= self._num_in_flight:
            raise OverloadedError(
                f"The server is at its limit of {self._max_queue} requests at a time; try again later."
            )

    def enter(self, caller: str) -> Callable[[], None]:
        """Takes a place and returns what gives it back. Raises `OverloadedError` or `RateLimitError`."""
        try:
            self.check_room()
        except OverloadedError:
            self._metrics.rejected("max_queue")
            raise
        if caller != ANONYMOUS and 0 < self._max_per_caller <= self._of_caller[caller]:
            self._metrics.rejected("max_concurrency_per_key")
            raise RateLimitError(
                f"This API key is at its limit of {self._max_per_caller} requests at a time; try again later."
            )
        began = self._clock()
        self._count(caller, 1)

        def leave() -> None:
            self._count(caller, -1)
            self._mean_s += _WEIGHT * (self._clock() - began - self._mean_s)

        return leave

    def most(self, caller: str) -> int | None:
        """How many places `caller` can have at a time; None is no limit."""
        own = 0 if caller == ANONYMOUS else self._max_per_caller
        return min((limit for limit in (self._max_queue, own) if limit > 0), default=None)

    def retry_after_s(self) -> int:
        """Whole seconds until one of the places is expected to be free, 1 to `MAX_RETRY_AFTER_S`."""
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(self._mean_s / max(1, self._num_in_flight))))

    def _count(self, caller: str, change: int) -> None:
        self._num_in_flight += change
        self._of_caller[caller] += change
        if self._of_caller[caller] == 0:
            del self._of_caller[caller]
        self._metrics.in_flight.set(self._num_in_flight)


class _Places:
    """What one request has taken."""

    def __init__(self, admission: Admission, caller: str) -> None:
        self.admission = admission
        self.caller = caller
        self._leave: list[Callable[[], None]] = []

    def take(self) -> None:
        self._leave.append(self.admission.enter(self.caller))

    def give_back(self) -> None:
        while self._leave:
            self._leave.pop()()


_places: ContextVar[_Places | None] = ContextVar("places", default=None)


def take_places_of_choices(number: int) -> None:
    """A place for each choice of the current request, which has one; they are given back when it is over.

    Raises `OverloadedError` or `RateLimitError`, and `InvalidRequestError` for more than there can be.
    """
    places = _places.get()
    if places is None:
        return
    most = places.admission.most(places.caller)
    if most is not None and number > most:
        raise InvalidRequestError(
            f"Invalid 'n': expected a value <= {most}, the requests that this server takes at a time: each choice is "
            "one.",
            param="n",
            code="integer_above_max_value",
        )
    for _ in range(number - 1):
        places.take()


class AdmissionMiddleware:
    """A place for each POST and each WebSocket under `/v1/`, from before its body is read until it is over; those of
    its choices are taken when their number is known."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self.app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generates = scope["type"] == "websocket" or (scope["type"] == "http" and scope["method"] == "POST")
        if not generates or not path_of(scope).startswith("/v1/"):
            await self.app(scope, receive, send)
            return
        record = current_request()
        places = _Places(self._admission, ANONYMOUS if record is None else record.caller)
        try:
            places.take()
        except (OverloadedError, RateLimitError) as error:
            headers = {"retry-after": str(self._admission.retry_after_s())}
            await error_response(error, headers)(scope, receive, send)
            return
        _places.set(places)
        try:
            await self.app(scope, receive, send)
        finally:
            places.give_back()
