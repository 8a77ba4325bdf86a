"""The servers of the checklist: the shared one, and a second one for the rows that need flags."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.integration.checklist.curl import Curl
from tests.integration.checklist.guarded import FLAGS, MediaHost
from tests.integration.server_process import ServerProcess, wait_until


@pytest.fixture(scope="module")
def curl(server: ServerProcess) -> Curl:
    return Curl(server.url)


@pytest.fixture(scope="package")
def guarded_server(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, media_host: MediaHost
) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("guarded") / "log.txt"
    allowed_host = ("--allowed-media-domains", f"127.0.0.1:{media_host.port}")
    with ServerProcess(checkpoint, log, *FLAGS, *allowed_host) as server:
        yield server
    assert "Traceback" not in server.log


@pytest.fixture
def guarded(guarded_server: ServerProcess) -> ServerProcess:
    """With keys, limits, an allowed site and an allowed host (`FLAGS`), and nothing to do."""
    wait_until(lambda: httpx2.get(f"{guarded_server.url}/load").json() == {"server_load": 0}, 60)
    return guarded_server


@pytest.fixture(scope="package")
def media_host() -> Iterator[MediaHost]:
    with MediaHost() as host:
        yield host
