"""Checkpoints and pipelines that the integration tests share; each is made once."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest

from scripts.demo_checkpoint import make_demo_checkpoint
from tests.integration.live import LiveOmni, demo_config
from tests.integration.server_process import ServerProcess
from tests.reference.reference import Reference
from tests.unit.api.collector import Collector


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint as `scripts/serve` makes it."""
    return make_demo_checkpoint(tmp_path_factory.mktemp("demo") / "checkpoint")


@pytest.fixture(scope="session")
def other_seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_checkpoint(tmp_path_factory.mktemp("seed1") / "checkpoint", seed=1)


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
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="session")
def whole(checkpoint: Path) -> Iterator[LiveOmni]:
    """Rows through shared memory; the waveform of an utterance in one pass, as the reference does it."""
    live = LiveOmni(checkpoint, demo_config(chunks={"mode": "whole"}))
    yield live
    live.close()


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Gets the traces of `server`."""
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="session")
def server(
    checkpoint: Path, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """The real server; after the last test that needs it, SIGTERM must end it cleanly."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    process = ServerProcess(checkpoint, log, "--otlp-traces-endpoint", collector.url)
    try:
        yield process
    finally:
        exit_code = process.terminate()
    assert exit_code == 0, process.log
    process.wait_until_nothing_is_left()
    assert "Traceback" not in process.log
    assert "leaked" not in process.log  # what libraries say when they are not cleaned up


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def official(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """Retries would hide failures."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client
