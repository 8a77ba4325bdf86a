"""`omni-server ray deploy` on a Ray cluster of two nodes on this machine, each with a pipeline of the demo
checkpoint. If root runs this, the second node has a /dev/shm of its own, as another machine has."""

import base64
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2
import numpy as np
import numpy.typing as npt
import openai
import pytest

from omni_server.cli.main import main
from tests.integration.server_process import MODEL, ROOT, free_port, is_running, parent_of, wait_until
from tests.integration.test_server import ENDLESS, answer_to, outcome, samples_of, spoken, stream_of, text_of
from tests.omni_families import QWEN2_5_OMNI
from tests.unit.api.clients import URL

pytestmark = pytest.mark.filterwarnings(
    "ignore:connect\\(\\) must be used as a context manager:DeprecationWarning"  # OpenAI's client does so
)

DEPLOY_TIMEOUT_S = 900
REPLACEMENT_TIMEOUT_S = 180
SAMPLE_RATE = 24000
MAX_AUDIO_AHEAD_S = 2
"""The next piece of audio, of 2 s at most, is sent when a listener has so much to play. With Ray's default of
10 a surviving stream would be followed for longer."""


@dataclass(frozen=True)
class Pipeline:
    """As `omni-server replicas list` shows it."""

    pid: int
    """Of the Ray Serve replica."""
    num_requests: int
    """In the stage that has most."""
    engine_pids: list[int]


class SpeechStream:
    """An answer that is read as far as it is needed."""

    def __init__(self, response: httpx2.Response) -> None:
        """Returns when the first sound is there."""
        self._lines = response.iter_lines()
        self._sound = b""
        assert self.reaches(0.1)

    @property
    def samples(self) -> npt.NDArray[np.int16]:
        return np.frombuffer(self._sound, "<i2")

    def reaches(self, seconds: float) -> bool:
        """Whether so much speech came before the connection was cut. The answer must not end before."""
        try:
            while self.samples.size < seconds * SAMPLE_RATE:
                line = next(self._lines)
                assert line != "data: [DONE]", f"the answer has only {self.samples.size} samples"
                if '"data":' in line:
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    self._sound += base64.b64decode(choice["delta"]["audio"]["data"])
        except httpx2.RemoteProtocolError:
            return False
        return True


class RayPipelines:
    """A cluster with two pipelines. They are found as their operator finds them: through HTTP and
    `omni-server replicas`."""

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
                start_new_session=True,
            )
        assert self._cluster.stdout is not None
        address = self._cluster.stdout.readline().strip()
        try:
            flags = ["--stage-config", QWEN2_5_OMNI.stage_config, "--served-model-name", MODEL]
            flags += ["--address", address, "--host", "127.0.0.1", "--port", str(port), "--pipelines", "2"]
            self._deploy(str(checkpoint), *flags, "--max-audio-ahead", str(MAX_AUDIO_AHEAD_S))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        assert self._cluster.stdin is not None
        assert self._cluster.stdout is not None
        self._cluster.stdin.close()
        try:
            assert self._cluster.wait(120) == 0, self.log.read_text()
        finally:
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(self._cluster.pid, signal.SIGKILL)
            self._cluster.stdout.close()
            self._temp.cleanup()

    def listed(self) -> list[Pipeline]:
        """Those that are up."""
        pipelines, printed = [], io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
            patch.setattr(tempfile, "tempdir", self._temp.name)
            main(["replicas", "list"])
        for block in filter(None, printed.getvalue().split("\n\n")):
            server, _, *replicas = block.splitlines()
            rows = [row.split() for row in replicas]
            pids = [int(pid) for _, pid, *_ in rows if pid != "-"]  # "-" if an engine is down
            pipelines.append(
                Pipeline(int(server.split()[1].rstrip(",")), max(int(row[2]) for row in rows), pids)
            )
        return pipelines

    def is_on_head(self, pipeline: Pipeline) -> bool:
        """Whether the daemon of its node is a child of the cluster's program."""
        return parent_of(parent_of(pipeline.pid)) == self._cluster.pid

    def num_requests(self) -> list[int]:
        return [pipeline.num_requests for pipeline in self.listed()]

    def _deploy(self, *arguments: str) -> None:
        finished = subprocess.run(
            [sys.executable, "-m", "omni_server.cli.entry", "ray", "deploy", *arguments],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEPLOY_TIMEOUT_S,
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.fixture(scope="module")
def pipelines(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayPipelines]:
    running = RayPipelines(checkpoint, tmp_path_factory.mktemp("ray") / "cluster.log")
    try:
        listed = running.listed()
        yield running
        listed += running.listed()
    finally:
        running.close()
    assert not any(is_running(pid) for pipeline in listed for pid in pipeline.engine_pids)


@pytest.fixture(scope="module")
def client(pipelines: RayPipelines) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=pipelines.url, timeout=300) as client:
        yield client


def assert_same_beginning(one: npt.NDArray[np.int16], other: npt.NDArray[np.int16]) -> None:
    """Rounding may differ with what is computed at the same time."""
    size = min(one.size, other.size)
    assert np.abs(one[:size].astype(int) - other[:size]).max() <= 1


def test_each_node_runs_a_pipeline(pipelines: RayPipelines) -> None:
    listed = pipelines.listed()
    assert [len(pipeline.engine_pids) for pipeline in listed] == [3, 3]
    assert len({parent_of(pipeline.pid) for pipeline in listed}) == 2  # Ray's daemon of the node


def test_what_comes_through_one_proxy_is_shared_by_the_pipelines_of_both_nodes(client: httpx2.Client) -> None:
    served = []  # by the pipeline that answers, before this request
    for _ in range(50):  # one after the other on one connection, and so through one proxy
        metrics = client.get("/metrics").text
        counted = re.search(r'^http_requests_total\{handler="/metrics",.* (\S+)$', metrics, re.MULTILINE)
        served.append(float(counted[1]) if counted else 0.0)
    assert served != [served[0] + index for index in range(50)]  # which are the counts if one answers all


def test_a_streamed_answer_is_the_whole_one(client: httpx2.Client) -> None:
    completion = answer_to(client, spoken())
    text, sound = outcome(completion)
    assert samples_of(completion).any()
    for _ in range(6):
        streamed = stream_of(client, spoken())
        assert (streamed.transcript, streamed.data) == (text, sound)


def test_a_realtime_session_answers(pipelines: RayPipelines) -> None:
    official = openai.OpenAI(base_url=f"{pipelines.url}/v1", api_key="EMPTY", max_retries=0)
    with official.realtime.connect(model=MODEL) as connection:
        connection.response.create(response={"output_modalities": ["text"], "max_output_tokens": 4})
        kinds = []
        for event in connection:
            kinds.append(event.type)
            if event.type == "response.done":
                break
    assert kinds[:2] == ["session.created", "response.created"]


def test_a_client_that_disconnects_ends_its_request(pipelines: RayPipelines, client: httpx2.Client) -> None:
    with client.stream("POST", URL, json=spoken(**ENDLESS) | {"stream": True}) as response:
        lines = response.iter_lines()  # closes the response when it is collected
        next(lines)
        assert sum(pipelines.num_requests()) == 1
    wait_until(lambda: sum(pipelines.num_requests()) == 0, 30)


def test_a_killed_pipeline_ends_its_own_streams_only_and_is_replaced(
    pipelines: RayPipelines, client: httpx2.Client
) -> None:
    before = outcome(answer_to(client, spoken()))
    # Three minutes of speech: no stream is over, or sent as a whole, when its pipeline is killed.
    talker = ENDLESS | {"max_tokens": 9000, "temperature": 0}
    body = spoken() | {"stage_sampling": {"talker": talker}, "stream": True}
    with ExitStack() as left:
        started = time.monotonic()
        streams: list[SpeechStream] = []
        killed, other = pipelines.listed()
        while 0 in (killed.num_requests, other.num_requests):
            assert len(streams) < 10
            streams.append(SpeechStream(left.enter_context(client.stream("POST", URL, json=body))))
            killed, other = pipelines.listed()
        assert killed.num_requests + other.num_requests == len(streams)

        os.kill(killed.pid, signal.SIGKILL)

        unsent_s = time.monotonic() - started + 2 * MAX_AUDIO_AHEAD_S
        cut = [stream for stream in streams if not stream.reaches(unsent_s)]
        assert (len(cut), len(streams) - len(cut)) == (killed.num_requests, other.num_requests)
        assert text_of(answer_to(client, spoken())) == before[0]
    for stream in streams[1:]:
        assert_same_beginning(stream.samples, streams[0].samples)
    wait_until(lambda: not any(map(is_running, killed.engine_pids)), 60)

    def is_replaced() -> bool:
        pids = {pipeline.pid for pipeline in pipelines.listed()}
        return len(pids) == 2 and killed.pid not in pids

    wait_until(is_replaced, REPLACEMENT_TIMEOUT_S)
    for _ in range(4):
        assert outcome(answer_to(client, spoken())) == before


def test_the_loss_of_a_node_ends_its_pipeline_only(pipelines: RayPipelines, client: httpx2.Client) -> None:
    wait_until(lambda: len(pipelines.listed()) == 2, REPLACEMENT_TIMEOUT_S)
    before = outcome(answer_to(client, spoken()))
    (lost,) = [pipeline for pipeline in pipelines.listed() if not pipelines.is_on_head(pipeline)]

    os.kill(parent_of(lost.pid), signal.SIGKILL)

    wait_until(lambda: not any(map(is_running, [lost.pid, *lost.engine_pids])), 60)
    (remaining,) = pipelines.listed()
    assert remaining.pid != lost.pid
    with httpx2.Client(base_url=pipelines.url, timeout=300) as new:
        assert outcome(answer_to(new, spoken())) == before
