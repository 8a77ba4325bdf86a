"""Accepts connections, which take only a part of the process's file descriptors: the rest is for engines,
files and media."""

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress

from omni_server.api.http_protocol import HttpProtocol

logger = logging.getLogger(__name__)

MAX_DESCRIPTORS = 16384
"""More than these are not used for connections. Each may hold 64 KiB of a request that is still arriving."""
_ACCEPTED_AT_ONCE = 64
"""Connections that are accepted before other tasks run."""
_CLOSED_AT_ONCE = 1 / 8
"""Of the idle connections. It makes the search for them cheap for each new connection."""
_RETRY_S = 1.0
"""Before the next attempt, if the system has no descriptor or memory for a connection."""
_WARNING_PERIOD_S = 60.0


def num_descriptors() -> int:
    """File descriptors for connections and everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MAX_DESCRIPTORS)


def max_active_requests() -> int:
    """Concurrent requests that leave descriptors for health checks."""
    return num_descriptors() // 2


class Acceptor:
    """Accepts connections. When three quarters of the descriptors are in use, those that have been idle for
    the longest are closed for new ones, so that health checks are always answered."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], HttpProtocol],
        connections: Iterable[asyncio.BaseProtocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        """`connections`: the open ones; those that have become WebSockets are never closed."""
        self._listener = listener
        self._make_protocol = make_protocol
        self._connections = connections
        self._tls = tls
        self._max_descriptor = num_descriptors() * 3 // 4
        self._handshakes: dict[asyncio.Task[None], None] = {}
        """In the order of their start."""
        self._warned_at = float("-inf")

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            for _ in range(_ACCEPTED_AT_ONCE):
                try:
                    connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
                except OSError as error:  # no descriptors or memory
                    self._make_room(f"cannot accept connections: {error}")
                    await asyncio.sleep(_RETRY_S)
                    break
                is_full = connection.fileno() >= self._max_descriptor  # the lowest that was free
                if is_full and not self._make_room(f"{self._max_descriptor} file descriptors are in use"):
                    connection.close()
                else:
                    self._start(connection)
                if is_full:
                    break
            await asyncio.sleep(0)  # connections are closed in the next turn of the event loop

    def _start(self, connection: socket.socket) -> None:
        task = asyncio.create_task(self._connect(connection))
        self._handshakes[task] = None
        task.add_done_callback(self._handshakes.pop)

    async def _connect(self, connection: socket.socket) -> None:
        with suppress(OSError):  # a client that has left, or does not speak TLS
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(self._make_protocol, connection, ssl=self._tls)

    def _make_room(self, reason: str) -> bool:
        """Closes idle connections. Returns False if there are none."""
        now = asyncio.get_running_loop().time()
        idle = [open_ for open_ in self._connections if isinstance(open_, HttpProtocol) and open_.is_idle]
        idle.sort(key=lambda connection: connection.idle_since)
        handshakes = [] if self._tls is None else list(self._handshakes)
        for connection in idle[: 1 + int(len(idle) * _CLOSED_AT_ONCE)]:
            connection.transport.abort()
        for handshake in handshakes[: 1 + int(len(handshakes) * _CLOSED_AT_ONCE)]:
            handshake.cancel()
        if now - self._warned_at >= _WARNING_PERIOD_S:
            self._warned_at = now
            logger.warning(
                "%s, and the limit is %d (ulimit -n): idle connections are closed, and further ones if none "
                "is idle",
                reason,
                num_descriptors(),
            )
        return bool(idle or handshakes)
