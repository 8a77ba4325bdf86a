"""Scripted servers for the tests of whole runs."""

import signal
from collections.abc import Callable, Iterator

import pytest

from tests.unit.bench.scripted_server import Json, Reply, ScriptedServer, Start


@pytest.fixture(autouse=True)
def sigint() -> Iterator[None]:
    """An interrupted run ignores further interrupts until its process ends, which here goes on."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[ScriptedServer] = []

    def start_server(reply: Callable[[Json, int], Reply]) -> ScriptedServer:
        servers.append(ScriptedServer(reply))
        return servers[-1]

    yield start_server
    for server in servers:
        server.close()
