"""The servers of the checklist: the shared one, and a second one for the rows that need flags."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.integration.checklist.curl import Curl
from tests.integration.checklist.guarded import GuardedServers, MediaHost
from tests.integration.server_process import ServerProcess, wait_until


@pytest.fixture(scope="module")
def curl(server: ServerProcess) -> Curl:
    return Curl(server.url)


@pytest.fixture(scope="package")
def guarded_servers(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, media_host: MediaHost
) -> Iterator[GuardedServers]:
    with GuardedServers(checkpoint, tmp_path_factory.mktemp("guarded"), media_host) as servers:
        yield servers


@pytest.fixture
def guarded(guarded_servers: GuardedServers) -> ServerProcess:
    """With keys, limits, an allowed site and an allowed host (`GuardedServers`), and nothing to do."""
    server = guarded_servers.running()
    wait_until(lambda: httpx2.get(f"{server.url}/load").json() == {"server_load": 0}, 60)
    return server


@pytest.fixture(scope="package")
def media_host() -> Iterator[MediaHost]:
    with MediaHost() as host:
        yield host
