"""Builds one engine within a time limit: its forked process, and vLLM's client for it in this process."""

import asyncio
import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.renderers import BaseRenderer
from vllm.transformers_utils.config import maybe_register_config_serialize_by_value
from vllm.utils.network_utils import ZmqListener, make_zmq_listener
from vllm.v1.engine.utils import EngineHandshakeMetadata, EngineZmqAddresses
from vllm.v1.executor import Executor

from omni_server.engine.async_engine import StageAsyncLLM
from omni_server.engine.cancellation import in_daemon_thread, uninterrupted
from omni_server.engine.engine_main import run_engine
from omni_server.engine.engine_processes import KILL_TIMEOUT_S, EngineProcesses
from omni_server.engine.fork_server import start_process
from omni_server.engine.kept_renderer import kept_renderer
from omni_server.engine.start_progress import StartProgress
from omni_server.errors import ConfigError

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5
"""Timeout for connecting to an existing socket."""

_IDENTITY = (0).to_bytes(2, "little")
"""vLLM's name for the first data-parallel rank on its sockets; a stage has one rank."""


@dataclass(frozen=True)
class BuiltEngine:
    """An engine that is ready."""

    client: StageAsyncLLM
    processes: EngineProcesses


async def build_engine(
    name: str,
    client_class: type[StageAsyncLLM],
    arguments: AsyncEngineArgs,
    *,
    environment: Mapping[str, str],
    folder: Path,
    timeout_s: float,
    progress: StartProgress,
    renderer: BaseRenderer[Any] | None = None,
) -> BuiltEngine:
    """Builds the engine of stage `name`. Its process gets only `environment`; its sockets are in `folder`.
    `renderer` is that of its predecessor, if it has one.

    Leaves nothing behind after an error. Raises `ConfigError`.
    """
    building = _Building(client_class, arguments, environment, folder, renderer)
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await building.run()
    except Exception as exc:
        if not limit.expired():
            raise ConfigError(f"stage '{name}' did not start: {str(exc) or type(exc).__name__}") from exc
        reached = progress.last_phase(name) or "starting its process"
        raise ConfigError(
            f"stage '{name}' was not ready after {timeout_s:g} s (start_timeout_s); it had come to: {reached}"
        ) from None


@dataclass
class _Building:
    """One engine under construction.

    Blocking calls run in threads. If the engine is given up, the threads are abandoned, and end whatever they
    create afterwards.
    """

    client_class: type[StageAsyncLLM]
    arguments: AsyncEngineArgs
    environment: Mapping[str, str]
    folder: Path
    """The server's own folder, which no other user can enter; holds the sockets."""
    renderer: BaseRenderer[Any] | None

    def __post_init__(self) -> None:
        self._handshake_address, self._input_address, self._output_address = (
            f"ipc://{self.folder}/{uuid.uuid4()}" for _ in range(3)
        )
        self._is_given_up = threading.Event()
        self._process: BaseProcess | None = None
        self._processes: EngineProcesses | None = None
        self._client: asyncio.Task[StageAsyncLLM] | None = None
        self._has_client = threading.Event()

    async def run(self) -> BuiltEngine:
        try:
            config = await in_daemon_thread(self.arguments.create_engine_config)
            processes = self._processes = await in_daemon_thread(lambda: EngineProcesses(self._start(config)))
            # Both read the model's files for about a second, so they run at the same time.
            make_client = partial(self._make_client, config, self._listeners())
            self._client = asyncio.create_task(in_daemon_thread(make_client))
            await self._handshake(processes)
            await _unless_ended(processes, self._client)
            await in_daemon_thread(processes.look_again)
            return BuiltEngine(self._client.result(), processes)
        except BaseException:
            await uninterrupted(self._give_up())
            raise

    def _start(self, config: VllmConfig) -> BaseProcess:
        maybe_register_config_serialize_by_value()
        arguments = {
            "vllm_config": config,
            "local_client": True,
            "handshake_address": self._handshake_address,
            "executor_class": Executor.get_class(config),
            "log_stats": False,
        }
        self._process = start_process(run_engine, dict(self.environment), arguments)
        if self._is_given_up.is_set():
            self._process.kill()
        return self._process

    def _listeners(self) -> tuple[ZmqListener, ZmqListener]:
        """Binds the client's sockets. vLLM would bind them later, when the engine may have been given up and
        the folder removed. If it cannot bind a socket, it leaks the socket and with it a context that never
        ends."""
        return make_zmq_listener(self._input_address, zmq.ROUTER), make_zmq_listener(
            self._output_address, zmq.PULL
        )

    def _make_client(self, config: VllmConfig, listeners: tuple[ZmqListener, ZmqListener]) -> StageAsyncLLM:
        """Creates vLLM's client. Its constructor returns when the engine has greeted it."""
        inputs, outputs = listeners
        try:
            with kept_renderer(self.renderer):
                client = self.client_class(
                    config,
                    Executor.get_class(config),
                    log_stats=False,
                    log_requests=False,
                    client_addresses={
                        "input_address": inputs.address,
                        "input_listener": inputs.socket,
                        "output_address": outputs.address,
                        "output_listener": outputs.socket,
                    },
                )
        finally:
            self._has_client.set()
            inputs.close()
            outputs.close()
        if self._is_given_up.is_set():
            client.shutdown()
        return client

    async def _handshake(self, processes: EngineProcesses) -> None:
        """vLLM's handshake: an engine sends HELLO, gets its client's addresses, loads, and sends READY.

        Raises `RuntimeError` if its process ends first.
        """
        metadata = EngineHandshakeMetadata(
            EngineZmqAddresses([self._input_address], [self._output_address]), {}
        )
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 0
            socket.bind(self._handshake_address)
            await self._message(socket, processes, "HELLO")
            await socket.send_multipart([_IDENTITY, msgspec.msgpack.encode(metadata)])
            await self._message(socket, processes, "READY")

    async def _message(self, socket: zmq.asyncio.Socket, processes: EngineProcesses, expected: str) -> None:
        assert self._client is not None
        message = asyncio.ensure_future(socket.recv_multipart())
        try:
            await _unless_ended(processes, message, self._client)
            if self._client.done():
                self._client.result()  # raises if the model's files are unsuitable
                await _unless_ended(processes, message)
            _, body = message.result()
        finally:
            message.cancel()  # no effect if it is done
        status = msgspec.msgpack.decode(body)["status"]
        if status != expected:
            raise RuntimeError(f"its engine said {status} where {expected} was due")

    async def _give_up(self) -> None:
        self._is_given_up.set()
        if self._process is not None:
            processes = self._processes or EngineProcesses(self._process)
            await in_daemon_thread(processes.kill)
            if await in_daemon_thread(partial(processes.wait, KILL_TIMEOUT_S)):
                processes.remove_leftovers()
            else:
                logger.warning("process %d of an engine does not end after SIGKILL", processes.core_pid)
        if self._client is not None:
            if not self._has_client.is_set():
                has_connected = asyncio.Event()
                connected = partial(asyncio.get_running_loop().call_soon_threadsafe, has_connected.set)
                threading.Thread(target=self._greet, args=(connected,), daemon=True).start()
                with suppress(TimeoutError):
                    async with asyncio.timeout(CONNECT_TIMEOUT_S):
                        await has_connected.wait()  # the folder may be removed afterwards
            if self._client.cancel():
                return
            # The client was created just before.
            if not self._client.cancelled() and self._client.exception() is None:
                await in_daemon_thread(self._client.result().shutdown)

    def _greet(self, connected: Callable[[], object]) -> None:
        """Greets the client in place of the dead engine. Its constructor waits for that and cannot be
        interrupted."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.identity = _IDENTITY
            with socket.get_monitor_socket(zmq.EVENT_CONNECTED) as monitor:
                socket.connect(self._input_address)
                monitor.poll(CONNECT_TIMEOUT_S * 1000)
                socket.disable_monitor()
            connected()
            socket.send(b"")
            self._has_client.wait()


async def _unless_ended(processes: EngineProcesses, *waited: asyncio.Future[Any]) -> None:
    """Returns when one of `waited` is done. Raises `RuntimeError` if the engine ends first."""
    ended = asyncio.create_task(processes.until_ended())
    try:
        await asyncio.wait((*waited, ended), return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended.cancel()
    if not any(future.done() for future in waited):
        raise RuntimeError(f"{processes.why_ended()}; the lines above say why")
