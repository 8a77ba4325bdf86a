"""The servers of the checklist: the shared one, and a second one for the rows that need flags."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.integration.checklist.curl import Curl
from tests.integration.checklist.guarded import FLAGS
from tests.integration.server_process import ServerProcess, wait_until


@pytest.fixture(scope="module")
def curl(server: ServerProcess) -> Curl:
    return Curl(server.url)


@pytest.fixture(scope="package")
def guarded_server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("guarded") / "log.txt"
    with ServerProcess(checkpoint, log, *FLAGS) as server:
        yield server
    assert "Traceback" not in server.log


@pytest.fixture
def guarded(guarded_server: ServerProcess) -> ServerProcess:
    """With keys, limits and an allowed site (`FLAGS`), and nothing to do."""
    wait_until(lambda: httpx2.get(f"{guarded_server.url}/load").json() == {"server_load": 0}, 60)
    return guarded_server
