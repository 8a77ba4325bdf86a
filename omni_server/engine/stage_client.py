"""What the server's ends of all stages have in common: a name, an engine, an end."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

import zmq
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from omni_server.errors import StageDeadError, StageError

EngineT = TypeVar("EngineT", bound=AsyncLLM)

SHUTDOWN_TIMEOUT_S = 20.0
"""An engine process takes seconds to tear its interpreter down, more on a busy machine; then it is killed."""

WAKE_INTERVAL_S = 0.5


class StageClient(Generic[EngineT]):
    """Owns the stage's engine."""

    def __init__(self, name: str, engine: EngineT) -> None:
        self.name = name
        self._engine: EngineT | None = engine

    @property
    def engine(self) -> EngineT:
        """Raises `StageDeadError` after `shutdown`."""
        if self._engine is None:
            raise StageDeadError(self.name, "it has been shut down")
        return self._engine

    @property
    def is_dead(self) -> bool:
        """True after `shutdown` and when the engine process has died by itself."""
        return self._engine is None or self._engine.errored

    @property
    def num_active(self) -> int:
        """Requests that the stage has not finished; 0 after `shutdown`."""
        return 0 if self._engine is None else self._engine.output_processor.get_num_unfinished_requests()

    @property
    def pid(self) -> int:
        """Process id of the engine's core, for supervision and for tests that kill it."""
        resources = self.engine.engine_core.resources  # type: ignore[attr-defined]
        pid: int = resources.engine_manager.processes[0].pid
        return pid

    async def shutdown(self) -> None:
        """End the engine process. Harmless when it has ended already."""
        if self._engine is None:
            return
        # The object goes too: its finaliser fails when it runs at interpreter exit.
        engine, self._engine = self._engine, None
        if engine.output_handler is not None:
            # It would report the end of the process as a failure.
            engine.output_handler.cancel()
        ending = asyncio.create_task(asyncio.to_thread(engine.shutdown, timeout=SHUTDOWN_TIMEOUT_S))
        while not ending.done():
            await asyncio.wait([ending], timeout=WAKE_INTERVAL_S)
            await _wake(engine)
        await ending


async def _wake(engine: AsyncLLM) -> None:
    """A message that means nothing.

    vLLM ends an engine with SIGTERM and expects that to interrupt its main thread, which waits for input. Where
    the kernel gives the signal to another thread (seen with CUDA), only the next message lets the main thread
    notice it.
    """
    with suppress(EngineDeadError, zmq.ZMQError, TimeoutError):  # it has ended meanwhile
        await asyncio.wait_for(engine.engine_core.abort_requests_async([""]), WAKE_INTERVAL_S)


@contextmanager
def stage_errors(stage: str) -> Iterator[None]:
    """vLLM's engine errors as ours."""
    try:
        yield
    except EngineDeadError as exc:
        raise StageDeadError(stage, "its engine process has died") from exc
    except EngineGenerateError as exc:
        raise StageError(stage, f"generation failed: {exc.__cause__ or exc}") from exc


async def abort(engine: AsyncLLM, request_id: str, *, internal: bool = True) -> None:
    """Stop one request, by the engine's id or (not `internal`) the caller's; a dead engine holds nothing any more."""
    if engine.errored:
        return
    try:
        await engine.abort(request_id, internal=internal)
    except EngineDeadError:
        return
