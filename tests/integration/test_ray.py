"""`omni-server ray deploy` on a Ray cluster of one node, with the demo checkpoint.

Needs the extra `ray`: `scripts/test tests/integration/test_ray.py -m ray`.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest

from tests.integration.server_process import MODEL, ROOT, free_port, is_running, wait_until
from tests.integration.test_server import ENDLESS, answer_to, outcome, samples_of, spoken, stream_of
from tests.omni_families import QWEN2_5_OMNI
from tests.unit.api.clients import URL

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings(
        "ignore:connect\\(\\) must be used as a context manager:DeprecationWarning"  # OpenAI's client does so
    ),
]

DEPLOY_TIMEOUT_S = 300
REPLACEMENT_TIMEOUT_S = 180


class RayPipeline:
    """A cluster with one pipeline. It is found as its operator finds it: through HTTP and `omni-server
    replicas`."""

    def __init__(self, checkpoint: Path, log: Path) -> None:
        # Sockets are in the temporary folder, and their paths may have 107 bytes.
        self._temp = tempfile.TemporaryDirectory(prefix="ray-")
        self._environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": self._temp.name}
        self.log = log
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        with log.open("wb") as output:
            self._cluster = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.ray_cluster"],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        assert self._cluster.stdout is not None
        address = self._cluster.stdout.readline().strip()
        try:
            flags = ["--stage-config", QWEN2_5_OMNI.stage_config, "--served-model-name", MODEL]
            flags += ["--address", address, "--host", "127.0.0.1", "--port", str(port)]
            self._run("ray", "deploy", str(checkpoint), *flags)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        assert self._cluster.stdin is not None
        assert self._cluster.stdout is not None
        self._cluster.stdin.close()
        try:
            assert self._cluster.wait(60) == 0, self.log.read_text()
        finally:
            self._cluster.kill()
            self._cluster.stdout.close()
            self._temp.cleanup()

    def replica_pid(self) -> int | None:
        """Process id of the replica; None while there is none."""
        return self._listed()[0]

    def engine_pids(self) -> list[int]:
        return self._listed()[1]

    def _listed(self) -> tuple[int | None, list[int]]:
        listed = self._run("replicas", "list", check=False).splitlines()
        if not listed:
            return None, []
        pids = [line.split()[1] for line in listed[2:]]  # "-" if an engine is down
        return int(listed[0].split()[1].rstrip(",")), [int(pid) for pid in pids if pid != "-"]

    def _run(self, *arguments: str, check: bool = True) -> str:
        finished = subprocess.run(
            [sys.executable, "-m", "omni_server.cli.entry", *arguments],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEPLOY_TIMEOUT_S,
        )
        assert not check or finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout


@pytest.fixture(scope="module")
def pipeline(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayPipeline]:
    running = RayPipeline(checkpoint, tmp_path_factory.mktemp("ray") / "cluster.log")
    pids = running.engine_pids()
    yield running
    pids += running.engine_pids()
    running.close()
    assert not any(map(is_running, pids))


@pytest.fixture(scope="module")
def client(pipeline: RayPipeline) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=pipeline.url, timeout=300) as client:
        yield client


def load(client: httpx2.Client) -> int:
    """Running requests and sessions."""
    running: int = client.get("/load").json()["server_load"]
    return running


def test_a_streamed_answer_is_the_whole_one(client: httpx2.Client) -> None:
    completion, streamed = answer_to(client, spoken()), stream_of(client, spoken())

    text, sound = outcome(completion)
    assert (streamed.transcript, streamed.data) == (text, sound)
    assert samples_of(completion).any()


def test_a_realtime_session_answers(pipeline: RayPipeline) -> None:
    official = openai.OpenAI(base_url=f"{pipeline.url}/v1", api_key="EMPTY", max_retries=0)
    with official.realtime.connect(model=MODEL) as connection:
        connection.response.create(response={"output_modalities": ["text"], "max_output_tokens": 4})
        kinds = []
        for event in connection:
            kinds.append(event.type)
            if event.type == "response.done":
                break
    assert kinds[:2] == ["session.created", "response.created"]


def test_a_client_that_disconnects_ends_its_request(client: httpx2.Client) -> None:
    with client.stream("POST", URL, json=spoken(**ENDLESS) | {"stream": True}) as response:
        lines = response.iter_lines()  # closes the response when it is collected
        next(lines)
        assert load(client) == 1
    wait_until(lambda: load(client) == 0, 30)


def test_a_killed_replica_takes_its_engines_with_it_and_is_replaced(
    pipeline: RayPipeline, client: httpx2.Client
) -> None:
    before = answer_to(client, spoken())
    killed, engines = pipeline.replica_pid(), pipeline.engine_pids()
    assert killed is not None
    assert len(engines) == 3

    os.kill(killed, signal.SIGKILL)

    wait_until(lambda: not any(map(is_running, engines)), 30)
    wait_until(lambda: pipeline.replica_pid() not in (None, killed), REPLACEMENT_TIMEOUT_S)
    assert outcome(answer_to(client, spoken())) == outcome(before)
