"""One server for all faults that it survives."""

import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from scripts.demo_checkpoint import make_demo_checkpoint
from tests.faults.full_disk import make_room, with_full_disks
from tests.faults.orders import FOLDER_VARIABLE
from tests.faults.supervised_server import (
    ANSWER_TIMEOUT_S,
    HANG_TIMEOUT_S,
    RECOVERY_TIMEOUT_S,
    SupervisedServer,
    write_config,
)
from tests.integration.server_process import wait_until
from tests.integration.test_server import answer_to, outcome, spoken, written


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_checkpoint(tmp_path_factory.mktemp("faults") / "checkpoint")


@pytest.fixture(scope="session")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which stages look for orders to fail."""
    folder = tmp_path_factory.mktemp("orders")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(folder))
        yield folder


@pytest.fixture(scope="session")
def server(
    checkpoint: Path, orders: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SupervisedServer]:
    """After the last test, SIGTERM must end it as cleanly as if nothing had happened, with a stage that is
    being restarted as well."""
    folder = tmp_path_factory.mktemp("server")
    config = write_config(
        folder / "stages.yaml", failing=True, hang_timeout_s=HANG_TIMEOUT_S, max_restarts=100, max_backoff_s=0
    )
    process = SupervisedServer(checkpoint, folder / "log.txt", "--stage-config", str(config), is_forked=False)
    try:
        yield process
        before = process.shared_files().keys()
        process.signal("talker", signal.SIGKILL)
        with process.client() as client:
            process.wait_until_down(client, "talker")
        # The next one has made a semaphore, which it will not be able to remove.
        wait_until(
            lambda: any(name.startswith("sem.mp-") for name in process.shared_files().keys() - before),
            RECOVERY_TIMEOUT_S,
        )
        exit_code = process.terminate()
    finally:
        process.process.kill()
        process.process.wait()
    assert exit_code == 0, process.log
    process.wait_until_nothing_is_left()
    assert "resource_tracker" not in process.log, "semaphores or shared memory of a dead engine were left"


@dataclass(frozen=True)
class Before:
    """The server as it was before the first fault."""

    speech: tuple[str, bytes]
    text: tuple[str, bytes]
    baseline: dict[str, float]


@pytest.fixture(scope="session")
def client(server: SupervisedServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=ANSWER_TIMEOUT_S) as client:
        yield client


@pytest.fixture(scope="session")
def before(server: SupervisedServer, client: httpx2.Client) -> Before:
    speech, text = outcome(answer_to(client, spoken())), outcome(answer_to(client, written()))
    server.wait_until_idle()
    return Before(speech, text, server.baseline(client))


UNWRITABLE = "/proc/sys/nothing"
"""Not even root can make it."""
UNWRITABLE_CACHES = ("TRITON_CACHE_DIR", "VLLM_CONFIG_ROOT")
FULL_CACHES = ("HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")
REQUEST_TIMEOUT_S = 30
"""Twice as long as is waited for what a client has left to be released: the deadline must not do it."""


@pytest.fixture(scope="session")
def temporary() -> Iterator[Path]:
    """The folder for temporary files of `patient`; not one of pytest's, whose paths are too long for
    sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        make_room(Path(folder))
        yield Path(folder)


@pytest.fixture(scope="session")
def full_caches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of `patient`, by environment variable."""
    folder = tmp_path_factory.mktemp("caches")
    return {name: folder / name for name in FULL_CACHES}


@pytest.fixture(scope="session")
def patient(
    checkpoint: Path,
    orders: Path,
    temporary: Path,
    full_caches: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SupervisedServer]:
    """A server that takes no stopped stage for one that hangs, ends each request after `REQUEST_TIMEOUT_S`,
    and can write its temporary files, but no cache. The last test that uses it ends it."""
    folder = tmp_path_factory.mktemp("patient")
    config = write_config(
        folder / "stages.yaml", failing=True, hang_timeout_s=None, max_restarts=100, max_backoff_s=1
    )
    flags = ["--stage-config", str(config), "--request-timeout", str(REQUEST_TIMEOUT_S)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        for name in UNWRITABLE_CACHES:
            patch.setenv(name, UNWRITABLE)
        for name, cache in full_caches.items():
            patch.setenv(name, str(cache))
        for name, value in with_full_disks(temporary, *full_caches.values()).items():
            patch.setenv(name, value)
        process = SupervisedServer(checkpoint, folder / "log.txt", *flags, is_forked=False)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()
