"""Checkpoints and pipelines that the integration tests share.

Engines take processor time even when they have nothing to do. So tests that share some run one after the
other, and the engines end when a file follows that does not need them."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest

import tests.quiet_configs  # noqa: F401
from tests.checkpoints.write import make_demo_checkpoint
from tests.integration.live import LiveOmni, demo_config
from tests.integration.parity import VIDEOS, qwen3_config
from tests.integration.server_process import ServerProcess
from tests.omni_families import FAMILIES, QWEN2_5_OMNI, QWEN3_OMNI, OmniFamily
from tests.reference.qwen3_reference import Qwen3Reference
from tests.reference.qwen3_tts import Qwen3TTSReference, write_checkpoints
from tests.reference.reference import Reference
from tests.unit.api.collector import Collector


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint as `scripts/serve` makes it."""
    return make_demo_checkpoint(tmp_path_factory.mktemp("demo") / "checkpoint")


@pytest.fixture(scope="session")
def other_sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_checkpoint(tmp_path_factory.mktemp("wide") / "checkpoint", size="wide")


@pytest.fixture(scope="session")
def qwen3_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-Omni's demo checkpoint."""
    folder = tmp_path_factory.mktemp("qwen3") / "checkpoint"
    return make_demo_checkpoint(folder, family="qwen3_omni")


@pytest.fixture(scope="session")
def qwen3_wide_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_wide") / "checkpoint"
    return make_demo_checkpoint(folder, family="qwen3_omni", size="wide")


@pytest.fixture(scope="session")
def reference(checkpoint: Path, answer_folder: Path) -> Reference:
    return Reference(checkpoint, answer_folder)


@pytest.fixture(scope="session")
def qwen3_reference(qwen3_checkpoint: Path, answer_folder: Path) -> Qwen3Reference:
    return Qwen3Reference(qwen3_checkpoint, answer_folder)


@pytest.fixture(scope="session")
def qwen3_tts_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-TTS' demo checkpoint."""
    folder = tmp_path_factory.mktemp("tts") / "checkpoint"
    return make_demo_checkpoint(folder, family="qwen3_tts")


@pytest.fixture(scope="session")
def qwen3_tts_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one for each kind and size; see `TTSCase.checkpoint`."""
    folder = tmp_path_factory.mktemp("qwen3_tts")
    write_checkpoints(folder)
    return folder


@pytest.fixture(scope="session")
def qwen3_tts_reference(qwen3_tts_checkpoints: Path, answer_folder: Path) -> Iterator[Qwen3TTSReference]:
    reference = Qwen3TTSReference(qwen3_tts_checkpoints, answer_folder)
    yield reference
    reference.close()


class SharedPipelines:
    """One for each family, started when the first test needs it, and again if one needs it that comes after
    its end."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request
        self._running: dict[str, LiveOmni] = {}

    def of(self, family: OmniFamily) -> LiveOmni:
        if family.name not in self._running:
            name, config = (
                ("checkpoint", demo_config(chunks={"mode": "whole"}))
                if family is QWEN2_5_OMNI
                else ("qwen3_checkpoint", qwen3_config(stages={"thinker": VIDEOS}))
            )
            self._running[family.name] = LiveOmni(self._request.getfixturevalue(name), config)
        return self._running[family.name]

    def close(self) -> None:
        running, self._running = self._running, {}
        for live in running.values():
            live.close()


@pytest.fixture(scope="session")
def shared_pipelines(request: pytest.FixtureRequest) -> Iterator[SharedPipelines]:
    pipelines = SharedPipelines(request)
    request.session.stash[SHARED]["shared_pipelines"] = pipelines
    yield pipelines
    pipelines.close()


@pytest.fixture(scope="module")
def whole(shared_pipelines: SharedPipelines) -> LiveOmni:
    """Rows through shared memory; the waveform of an utterance in one pass, as the reference does it."""
    return shared_pipelines.of(QWEN2_5_OMNI)


@pytest.fixture(scope="module")
def qwen3_live(shared_pipelines: SharedPipelines) -> LiveOmni:
    """Qwen3-Omni's demo config, with as many videos as the cases of the reference have."""
    return shared_pipelines.of(QWEN3_OMNI)


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Gets the traces of `server`."""
    with Collector() as collector:
        yield collector


class SharedServers:
    """One server for each family, started as `SharedPipelines` are. All but Qwen2.5-Omni's find their stage
    config, as users start them."""

    def __init__(self, request: pytest.FixtureRequest, folder: Path) -> None:
        self._request = request
        self._folder = folder
        self._started: dict[str, ServerProcess] = {}

    def of(self, family: OmniFamily) -> ServerProcess:
        if family.name not in self._started:
            log = self._folder / f"{family.name}.txt"
            if family is QWEN2_5_OMNI:
                checkpoint, collector = map(self._request.getfixturevalue, ("checkpoint", "collector"))
                server = ServerProcess(checkpoint, log, "--otlp-traces-endpoint", collector.url)
            else:
                name = "qwen3_checkpoint" if family is QWEN3_OMNI else "qwen3_tts_checkpoint"
                checkpoint = self._request.getfixturevalue(name)
                server = ServerProcess(checkpoint, log, "--cpu", stage_config=None, has_queue=family.chats)
            self._started[family.name] = server
        return self._started[family.name]

    def close(self) -> None:
        """SIGTERM must end each cleanly."""
        servers, self._started = self._started, {}
        exit_codes = [(server, server.terminate()) for server in servers.values()]
        for server, exit_code in exit_codes:
            assert exit_code == 0, server.log
            server.wait_until_nothing_is_left()
            assert "Traceback" not in server.log
            assert "leaked" not in server.log  # what libraries say when they are not cleaned up


@pytest.fixture(scope="session")
def shared_servers(
    request: pytest.FixtureRequest, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServers]:
    """They end before `collector`."""
    servers = SharedServers(request, tmp_path_factory.mktemp("server"))
    request.session.stash[SHARED]["shared_servers"] = servers
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> OmniFamily:
    """What `server` serves: `--family`, unless the test is marked with `for_each_family`."""
    family: OmniFamily = getattr(request, "param", FAMILIES[request.config.getoption("--family")])
    return family


@pytest.fixture(scope="module")
def server(shared_servers: SharedServers, family: OmniFamily) -> ServerProcess:
    return shared_servers.of(family)


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def official(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """Retries would hide failures."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


ENGINES = ("shared_servers", "shared_pipelines")
"""Fixtures of shared engines. Tests that use them run in this order, before those that use none."""
SHARED = pytest.StashKey[dict[str, SharedServers | SharedPipelines]]()
"""Those of this process, by fixture."""
NEEDS = pytest.StashKey[dict[Path, set[str]]]()
"""Which of `ENGINES` a file or folder directly below this one uses."""


def place_of(item: pytest.Item) -> Path | None:
    """The file or folder directly below this one; None for tests elsewhere."""
    here = Path(__file__).parent
    return here / item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else None


def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    needs: dict[Path, set[str]] = defaultdict(set)
    own: list[tuple[Path, pytest.Item]] = []
    for item in items:
        if (place := place_of(item)) is not None:
            assert isinstance(item, pytest.Function)
            needs[place] |= set(ENGINES) & set(item.fixturenames)
            own.append((place, item))
    own.sort(key=lambda placed: [name not in needs[placed[0]] for name in ENGINES])
    ordered = iter(own)
    items[:] = [item if place_of(item) is None else next(ordered)[1] for item in items]
    session.stash[SHARED], session.stash[NEEDS] = {}, needs


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None:
        return  # the fixtures' own ends follow
    place, session = place_of(nextitem), item.session
    needed = session.stash[NEEDS][place] if place is not None else set()
    for name, engines in session.stash[SHARED].items():
        if name not in needed:
            engines.close()
