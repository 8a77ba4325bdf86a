"""State that all requests share: the generator, and whether the server accepts, drains or aborts."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from omni_server import __version__
from omni_server.api.audio_pace import AudioPace
from omni_server.api.config import ApiConfig
from omni_server.api.server_metrics import ServerMetrics
from omni_server.api.unsent import UnsentBudget
from omni_server.api.voice_store import VoiceStore
from omni_server.errors import OmniError, OverloadedError
from omni_server.generation import Generator

if TYPE_CHECKING:
    from omni_server.api.otel import OtelTracer


class ServerState:
    """Belongs to one event loop. `run_server` writes it; the routes read it."""

    def __init__(self, generator: Generator | None = None, tracer: "OtelTracer | None" = None) -> None:
        self.generator = generator
        """None while the model is loading."""
        self.tracer = tracer
        """None if requests are not traced."""
        self.metrics = ServerMetrics(__version__)
        self.unsent = UnsentBudget(ApiConfig.max_unsent_bytes, ApiConfig.max_total_unsent_bytes)
        """Budget of all running answers."""
        self.voices = VoiceStore(None)
        self.max_audio_ahead_s = ApiConfig.max_audio_ahead_s
        self.draining = asyncio.Event()
        """Set once the server has been asked to stop."""
        self.abort_error: OmniError | None = None
        """Set by `abort`."""
        self.on_abort: set[Callable[[], object]] = set()
        """Called by `abort`."""
        self.is_ending = asyncio.Event()
        """Set by `drain` and `abort`: no audio is held back any more."""
        self.num_sessions = 0
        """Open WebSocket sessions."""
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def unavailability(self) -> OverloadedError | None:
        """Why the server cannot serve requests now, or None."""
        if self.draining.is_set():
            return OverloadedError("The server is shutting down.", code="server_shutting_down")
        if self.generator is None:
            return OverloadedError("The model is still loading.", code="model_not_ready")
        if not self.generator.is_alive():
            return OverloadedError("A stage of the server has died for good.", code="engine_dead")
        if not self.generator.is_ready():
            return OverloadedError("The model is still warming up.", code="model_not_ready")
        return None

    def require_generator(self) -> Generator:
        """Returns the generator for immediate use.

        Raises `OverloadedError` if `unavailability` has a reason.
        """
        reason = self.unavailability()
        if reason is not None:
            raise reason
        assert self.generator is not None
        return self.generator

    def require_all_stages(self) -> None:
        """Raises `OverloadedError` like `require_generator`, and `StageDownError` while a stage is down.
        Requests that do not need that stage are still served."""
        self.require_generator()
        assert self.generator is not None
        down = self.generator.stage_down()
        if down is not None:
            raise down

    def audio_pace(self, speed: float = 1.0) -> AudioPace | None:
        """Returns the pace of a new answer that is streamed; None if its audio is sent at once."""
        if self.max_audio_ahead_s is None or self.draining.is_set():
            return None
        return AudioPace(self.max_audio_ahead_s, self.is_ending, speed)

    @contextmanager
    def request_in_flight(self) -> Iterator[None]:
        """Counts a request as running inside the block."""
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

    def drain(self) -> None:
        """The server has been asked to stop: refuses new requests, and sends what running ones hold back."""
        self.draining.set()
        self.is_ending.set()

    def abort(self, error: OmniError) -> None:
        """Ends every running generation; clients receive `error`."""
        self.abort_error = error
        self.is_ending.set()
        for call in tuple(self.on_abort):
            call()
