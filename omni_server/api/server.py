"""Server process lifecycle: listen, load, serve, drain, stop."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import uvicorn
import websockets

from omni_server.api.app import create_app
from omni_server.api.config import ApiConfig
from omni_server.api.connections import Acceptor, max_active_requests, num_descriptors
from omni_server.api.http_protocol import HttpProtocol
from omni_server.api.images.sizes import check_size_limits
from omni_server.api.listener import address_of, listen, remove_unix_path
from omni_server.api.state import ServerState
from omni_server.api.tracing import open_tracer
from omni_server.api.websocket_protocol import WebSocketProtocol
from omni_server.errors import OverloadedError, StageDeadError
from omni_server.generation import Generator

logger = logging.getLogger(__name__)

_ALIVE_POLL_S = 0.25
_DEATH_GRACE_S = 2.0
"""How long requests of a dead stage get to end with the generator's error."""
_FLUSH_S = 2.0
"""How long aborted requests get to send their last frame."""

_MAX_WEBSOCKET_FRAME = 22 * 1024 * 1024
"""Bytes: 15 MiB of audio in base64, which a realtime client may send in one event, plus JSON."""

_LOGGERS = ("uvicorn.error", "uvicorn.asgi")
_SOURCES = (
    f"{Path(websockets.__file__).parent}/",  # headers of handshakes, and frames
    f"{Path(uvicorn.__file__).parent}/protocols/",  # URLs with their query
    f"{Path(uvicorn.__file__).parent}/middleware/message_logger.py",  # the same, and subprotocols
)
_OF_CLIENTS = frozenset(
    {
        "Invalid HTTP request received.",  # logged by this server itself
        "Invalid UTF-8 sequence received from client.",
        "Unsupported upgrade request.",
    }
)
"""uvicorn's warnings and errors that any client could flood the log with."""

StartGenerator = Callable[[], Awaitable[Generator]]
StopGenerator = Callable[[Generator], Awaitable[None]]


async def run_server(
    start: StartGenerator, stop: StopGenerator, config: ApiConfig, on_ready: Callable[[str], None]
) -> int:
    """Serves until a signal arrives or a stage dies permanently; returns the process's exit code.

    The port is opened first: probes get 503 while `start` loads the model. `on_ready` receives the server's
    address. On SIGTERM or SIGINT, running requests get `shutdown_timeout_s` to finish; a second SIGINT
    aborts them immediately; the code is 0. A signal before the server is ready gives 128 plus its number.
    Must run in the main thread, which handles signals.

    Raises `ConfigError` if the address, a TLS file, the trace endpoint or a limit of images is unusable, and
    what `start` raises; stopping the server cancels a running `start`.
    """
    if not 0 < config.max_queue <= max_active_requests():
        logger.warning(
            "at most %d requests at a time, because the limit of file descriptors is %d (ulimit -n)",
            max_active_requests(),
            num_descriptors(),
        )
        config = replace(config, max_queue=max_active_requests())
    listener = listen(config)
    try:
        with keys_kept_out(), _Signals() as signals:
            async with open_tracer(config.otlp_traces_endpoint) or contextlib.nullcontext() as tracer:
                state = ServerState(tracer=tracer)
                address = address_of(listener, is_tls=config.tls is not None)
                async with _web_server(state, config, listener) as serving:
                    return await _serve(
                        start, stop, state, config, signals, serving, lambda: on_ready(address)
                    )
    finally:
        listener.close()
        remove_unix_path(config)


async def _serve(
    start: StartGenerator,
    stop: StopGenerator,
    state: ServerState,
    config: ApiConfig,
    signals: "_Signals",
    serving: asyncio.Task[None],
    on_ready: Callable[[], None],
) -> int:
    generator = await _start_unless_stopped(start, signals)
    if generator is None:
        return 128 + signals.first
    try:
        check_size_limits(generator.model_info, config)
        state.generator = generator
        if signals.stop.is_set():
            return 128 + signals.first
        on_ready()
        died = asyncio.create_task(_wait_for_death(generator))
        try:
            await _first_of(died, serving, signals.stop.wait())
            if serving.done():
                logger.error("the web server has ended by itself")
                return 1
            if died.done():
                down = generator.stage_down()
                stage = "engine" if down is None else down.stage
                logger.error("stage '%s' has died for good; the server stops", stage)
                await _abort_rest(state, StageDeadError(stage, "it has died for good"), _DEATH_GRACE_S)
                return 1
            state.drain()
            logger.info("shutting down: waiting up to %g s for running requests", config.shutdown_timeout_s)
            await _first_of(
                died, signals.abort.wait(), state.wait_idle(), asyncio.sleep(config.shutdown_timeout_s)
            )
            error = OverloadedError("The server is shutting down.", code="server_shutting_down")
            await _abort_rest(state, error, 0.0)
            return 0
        finally:
            died.cancel()
    finally:
        await stop(generator)


async def _start_unless_stopped(start: StartGenerator, signals: "_Signals") -> Generator | None:
    starting = asyncio.ensure_future(start())
    try:
        await _first_of(starting, signals.stop.wait())
    finally:
        starting.cancel()  # no effect if it is done
        await asyncio.wait({starting})
    if starting.cancelled() and signals.stop.is_set():
        return None
    return starting.result()


async def _abort_rest(state: ServerState, error: StageDeadError | OverloadedError, grace_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(state.wait_idle(), grace_s)
        return
    state.abort(error)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(state.wait_idle(), _FLUSH_S)


async def _wait_for_death(generator: Generator) -> None:
    while generator.is_alive():  # noqa: ASYNC110 - a Generator can only be asked
        await asyncio.sleep(_ALIVE_POLL_S)


async def _first_of(*awaitables: Awaitable[object]) -> None:
    """Returns when one is done. Cancels the given coroutines, but not the given futures and tasks."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    own = [task for task, awaitable in zip(tasks, awaitables, strict=True) if task is not awaitable]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in own:
            task.cancel()
        await asyncio.gather(*own, return_exceptions=True)


class _Signals:
    """Handles signals in the block: the first SIGTERM or SIGINT sets `stop`, later SIGINTs set `abort`."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.abort = asyncio.Event()
        self.first = signal.SIGTERM
        """The signal that set `stop`."""

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if not self.stop.is_set():
            self.first = number
        elif number == signal.SIGINT:
            self.abort.set()
        self.stop.set()


class _QuietUvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: `run_server` drains."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        yield


@contextlib.asynccontextmanager
async def _web_server(
    state: ServerState, config: ApiConfig, listener: socket.socket
) -> AsyncIterator[asyncio.Task[None]]:
    """Runs uvicorn on a listening socket inside the block. The task completes only if the web server ends by
    itself."""
    tls = config.tls
    web = _QuietUvicorn(
        uvicorn.Config(
            create_app(state, config),
            http="h11",
            h11_max_incomplete_event_size=config.max_header_bytes,
            log_config=None,
            log_level=config.log_level,
            access_log=False,  # `RequestIdMiddleware` logs requests
            lifespan="off",
            ws=WebSocketProtocol,
            ws_max_size=_MAX_WEBSOCKET_FRAME,
            ws_per_message_deflate=False,  # base64 audio: much event loop time for little gain
            timeout_keep_alive=config.http_keep_alive_s,
            timeout_graceful_shutdown=1,  # requests have already been drained or aborted
            ssl_context_factory=None if tls is None else lambda *_: tls.context(),
        )
    )
    web.config.load()  # uvicorn would only do this in `serve`

    def protocol() -> HttpProtocol:
        return HttpProtocol(web.config, web.server_state, config, state.metrics)

    def stop(_: asyncio.Task[None]) -> None:
        web.should_exit = True

    accepting = asyncio.create_task(
        Acceptor(listener, protocol, web.server_state.connections, web.config.ssl).run()
    )
    accepting.add_done_callback(stop)
    serving = asyncio.create_task(web.serve(sockets=[]))  # it gets its connections from `accepting`
    try:
        yield serving
    finally:
        accepting.cancel()
        await serving
        with contextlib.suppress(asyncio.CancelledError):
            await accepting


@contextlib.contextmanager
def keys_kept_out() -> Iterator[None]:
    """Inside the block, drops what uvicorn and websockets log about requests below WARNING.

    The headers, the subprotocol and the URL's query of a handshake may contain a key. websockets logs
    everything that it sends and receives to uvicorn's logger at DEBUG; uvicorn itself logs the URLs of
    WebSockets, and everything but headers and bodies at its level TRACE. What it logs about malformed
    requests and messages is dropped, too.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(_may_be_written)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_may_be_written)


def _may_be_written(record: logging.LogRecord) -> bool:
    if record.msg in _OF_CLIENTS:
        return False
    return record.levelno >= logging.WARNING or not record.pathname.startswith(_SOURCES)
