"""One server of each family for all faults that it survives, ended with the last of these tests."""

import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from tests.checkpoints.write import make_demo_checkpoint
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
from tests.integration.test_server import IMAGE_PART, answer_to, outcome, spoken, written
from tests.omni_families import QWEN2_5_OMNI, QWEN3_OMNI, OmniFamily


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_checkpoint(tmp_path_factory.mktemp("faults") / "checkpoint")


@pytest.fixture(scope="session")
def qwen3_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_checkpoint(tmp_path_factory.mktemp("qwen3") / "checkpoint", family="qwen3_omni")


@pytest.fixture(scope="session")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which stages look for orders to fail."""
    folder = tmp_path_factory.mktemp("orders")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(folder))
        yield folder


@dataclass(frozen=True)
class Before:
    """The server as it was before the first fault."""

    speech: tuple[str, bytes]
    text: tuple[str, bytes]
    baseline: dict[str, float]


CHECKPOINTS = {QWEN2_5_OMNI.name: "checkpoint", QWEN3_OMNI.name: "qwen3_checkpoint"}
"""The fixture of a family's demo checkpoint, by the family's name."""


class SharedServers:
    """One server for each family, and how it was before the first fault."""

    def __init__(self, folder: Path, checkpoints: Callable[[OmniFamily], Path]) -> None:
        self._folder = folder
        self._checkpoints = checkpoints
        self._servers: dict[str, SupervisedServer] = {}
        self._before: dict[str, Before] = {}

    def of(self, family: OmniFamily) -> SupervisedServer:
        if family.name not in self._servers:
            config = write_config(
                self._folder / f"{family.name}.yaml",
                failing=True,
                family=family,
                hang_timeout_s=HANG_TIMEOUT_S,
                max_restarts=100,
                max_backoff_s=0,
            )
            self._servers[family.name] = SupervisedServer(
                self._checkpoints(family),
                self._folder / f"{family.name}.txt",
                *("--stage-config", str(config)),
                is_forked=False,
            )
        return self._servers[family.name]

    def before(self, family: OmniFamily, client: httpx2.Client) -> Before:
        if family.name not in self._before:
            server = self.of(family)
            speech, text = outcome(answer_to(client, spoken())), outcome(answer_to(client, written()))
            answer_to(client, spoken([IMAGE_PART]))  # some threads and files are made with the first
            server.wait_until_idle()
            self._before[family.name] = Before(speech, text, server.baseline(client))
        return self._before[family.name]

    def end(self) -> None:
        """SIGTERM must end each as cleanly as if nothing had happened, with a stage that is being restarted
        as well."""
        for server in self._servers.values():
            before = server.shared_files().keys()
            server.signal("talker", signal.SIGKILL)
            with server.client() as client:
                server.wait_until_down(client, "talker")
            # The next one has made a semaphore, which it will not be able to remove.
            wait_until(
                lambda server=server, before=before: any(
                    name.startswith("sem.mp-") for name in server.shared_files().keys() - before
                ),
                RECOVERY_TIMEOUT_S,
            )
            exit_code = server.terminate()
            assert exit_code == 0, server.log
            server.wait_until_nothing_is_left()
            assert "resource_tracker" not in server.log, (
                "semaphores or shared memory of a dead engine were left"
            )

    def kill(self) -> None:
        for server in self._servers.values():
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="package")
def shared_servers(
    request: pytest.FixtureRequest, orders: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServers]:
    """They look for orders in `orders`."""
    servers = SharedServers(
        tmp_path_factory.mktemp("server"), lambda family: request.getfixturevalue(CHECKPOINTS[family.name])
    )
    try:
        yield servers
        servers.end()
    finally:
        servers.kill()


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> OmniFamily:
    """What `server` serves: Qwen2.5-Omni, unless the test is marked with `for_each_family`."""
    family: OmniFamily = getattr(request, "param", QWEN2_5_OMNI)
    return family


@pytest.fixture(scope="module")
def server(shared_servers: SharedServers, family: OmniFamily) -> SupervisedServer:
    return shared_servers.of(family)


@pytest.fixture(scope="module")
def client(server: SupervisedServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=ANSWER_TIMEOUT_S) as client:
        yield client


@pytest.fixture(scope="module")
def before(shared_servers: SharedServers, family: OmniFamily, client: httpx2.Client) -> Before:
    return shared_servers.before(family, client)


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


def patient_flags(folder: Path, family: OmniFamily) -> list[str]:
    config = write_config(
        folder / "stages.yaml",
        failing=True,
        family=family,
        hang_timeout_s=None,
        max_restarts=100,
        max_backoff_s=1,
    )
    return ["--stage-config", str(config), "--request-timeout", str(REQUEST_TIMEOUT_S)]


@pytest.fixture(scope="package")
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
    flags = patient_flags(folder, QWEN2_5_OMNI)
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


@pytest.fixture(scope="module")
def qwen3_patient(
    qwen3_checkpoint: Path, orders: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SupervisedServer]:
    """As patient as `patient`, and without its full disks."""
    folder = tmp_path_factory.mktemp("patient")
    flags = patient_flags(folder, QWEN3_OMNI)
    with SupervisedServer(qwen3_checkpoint, folder / "log.txt", *flags) as process:
        yield process


PATIENTS = {QWEN2_5_OMNI.name: "patient", QWEN3_OMNI.name: "qwen3_patient"}
"""Their fixtures, by the family's name."""
