"""What all requests share: the generator, and whether the server takes, drains or aborts requests."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from omni_server import __version__
from omni_server.api.config import ApiConfig
from omni_server.api.observed import ObservedGenerator
from omni_server.api.request_span import RequestTracer
from omni_server.api.unsent import UnsentBudget
from omni_server.errors import OmniError, OverloadedError
from omni_server.generation import Generator
from omni_server.metrics.server_metrics import ServerMetrics


class ServerState:
    """Belongs to one event loop. `run_server` writes it, the routes read it."""

    def __init__(self, generator: Generator | None = None, tracer: RequestTracer | None = None) -> None:
        self.generator = generator
        """None while the model is loading."""
        self.tracer = tracer
        """None where requests are not traced."""
        self.metrics = ServerMetrics(__version__)
        self.unsent = UnsentBudget(ApiConfig.max_unsent_bytes, ApiConfig.max_total_unsent_bytes)
        """Of the answers that are being sent."""
        self.draining_begun = asyncio.Event()
        """Set from the moment that the server was asked to stop."""
        self.aborted = asyncio.Event()
        """Set by `abort`."""
        self.abort_error: OmniError | None = None
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def draining(self) -> bool:
        return self.draining_begun.is_set()

    @draining.setter
    def draining(self, is_draining: bool) -> None:
        if is_draining:
            self.draining_begun.set()
        else:
            self.draining_begun.clear()

    def unavailability(self) -> OverloadedError | None:
        """Why no request can be served now; None if one can."""
        if self.draining:
            return OverloadedError("The server is shutting down.", code="server_shutting_down")
        if self.generator is None:
            return OverloadedError("The model is still loading.", code="model_not_ready")
        if not self.generator.is_alive():
            return OverloadedError("A stage of the server has died for good.", code="engine_dead")
        if not self.generator.is_ready():
            return OverloadedError("The model is still warming up.", code="model_not_ready")
        return None

    def require_generator(self) -> ObservedGenerator:
        """The generator, to be used at once; what it generates is counted and logged.

        Raises `OverloadedError` where `unavailability` has a reason.
        """
        reason = self.unavailability()
        if reason is not None:
            raise reason
        assert self.generator is not None
        return ObservedGenerator(self.generator, self.metrics, lambda: self.abort_error)

    def require_all_stages(self) -> None:
        """Raises `OverloadedError` as `require_generator` does, and `StageDownError` while a stage is down: requests
        that do not need it are still served."""
        down = self.require_generator().stage_down()
        if down is not None:
            raise down

    @contextmanager
    def request_in_flight(self) -> Iterator[None]:
        """Counts a request as running while the block lasts."""
        self._num_in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Returns when no request is running."""
        await self._idle.wait()

    def abort(self, error: OmniError) -> None:
        """Ends every running generation; its client sees `error`."""
        self.abort_error = error
        self.aborted.set()
