"""Checkpoints, and a server with full disks, which several files share.

What survives a fault does not depend on the family. Most of these tests run with Qwen3-Omni, which has more
that can fail; most starts and ends of servers, with Qwen2.5-Omni. Qwen3-TTS, whose first stage speaks, runs
those about its own stages.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints.write import make_demo_checkpoint
from tests.faults.full_disk import make_room, with_full_disks
from tests.faults.orders import FOLDER_VARIABLE
from tests.faults.supervised_server import REQUEST_TIMEOUT_S, SupervisedServer, write_config
from tests.omni_families import QWEN3_OMNI, QWEN3_TTS, OmniFamily


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_checkpoint(tmp_path_factory.mktemp("faults") / "checkpoint")


@pytest.fixture(scope="session")
def qwen3_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_checkpoint(tmp_path_factory.mktemp("qwen3") / "checkpoint", family="qwen3_omni")


@pytest.fixture(scope="session")
def qwen3_tts_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_checkpoint(tmp_path_factory.mktemp("tts") / "checkpoint", family="qwen3_tts")


@pytest.fixture(scope="session")
def checkpoints(qwen3_checkpoint: Path, qwen3_tts_checkpoint: Path) -> dict[OmniFamily, Path]:
    return {QWEN3_OMNI: qwen3_checkpoint, QWEN3_TTS: qwen3_tts_checkpoint}


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> OmniFamily:
    """Of the server, as `tests.omni_families.for_families` names it."""
    family: OmniFamily = request.param
    return family


@pytest.fixture(scope="session")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which stages look for orders to fail."""
    folder = tmp_path_factory.mktemp("orders")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(folder))
        yield folder


@pytest.hookimpl(trylast=True)  # after pytest's own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with the server of one family follow each other: it starts once for a file."""
    here = Path(__file__).parent
    own = [item for item in items if isinstance(item, pytest.Function) and here in item.path.parents]
    files = list(dict.fromkeys(item.path for item in own))

    def place(item: pytest.Function) -> tuple[int, str]:
        family = item.callspec.params.get("family") if hasattr(item, "callspec") else None
        return files.index(item.path), family.name if isinstance(family, OmniFamily) else ""

    ordered = iter(sorted(own, key=place))
    items[:] = [next(ordered) if item in own else item for item in items]


UNWRITABLE = "/proc/sys/nothing"
"""Not even root can make it."""
UNWRITABLE_CACHES = ("TRITON_CACHE_DIR", "VLLM_CONFIG_ROOT")
FULL_CACHES = ("HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")


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


@pytest.fixture(scope="package")
def patient(
    qwen3_checkpoint: Path,
    orders: Path,
    temporary: Path,
    full_caches: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SupervisedServer]:
    """A server that takes no stopped stage for one that hangs, ends each request after `REQUEST_TIMEOUT_S`,
    and can write its temporary files, but no cache. The last test that uses it ends it."""
    folder = tmp_path_factory.mktemp("patient")
    config = write_config(
        folder / "stages.yaml",
        failing=True,
        family=QWEN3_OMNI,
        hang_timeout_s=None,
        max_restarts=100,
        max_backoff_s=1,
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
        process = SupervisedServer(qwen3_checkpoint, folder / "log.txt", *flags, is_forked=False)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()
