"""The server process with a look at its stages from outside: who runs where, and what is left when one is
gone."""

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.server_process import END_TIMEOUT_S, ROOT, ServerProcess, is_running, wait_until
from tests.omni_families import QWEN2_5_OMNI, OmniFamily
from tests.unit.api.clients import URL

STAGES = ("thinker", "talker", "code2wav")
RECOVERY_TIMEOUT_S = 180.0
ANSWER_TIMEOUT_S = 60.0
HANG_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 30
"""Twice as long as is waited for what a client has left to be released: the deadline must not do it."""

_RUNS = re.compile(r"stage '([\w/]+)' runs (?:again, after [\d.]+ s, )?in process (\d+)$", re.MULTILINE)


def demo_config(family: OmniFamily) -> Any:
    """The family's demo config, without stages that its demo checkpoint does not need."""
    config = yaml.safe_load((ROOT / family.stage_config).read_text())
    config["stages"] = {name: config["stages"][name] for name in family.stages}
    return config


def write_config(
    path: Path,
    *,
    failing: bool,
    num_clients: int = 0,
    family: OmniFamily = QWEN2_5_OMNI,
    replicas: int = 1,
    **supervision: Any,
) -> Path:
    """The family's demo config with this supervision, so many replicas of each stage, and with the failing
    models where they are wanted.

    With `num_clients`, code2wav keeps the state of so many utterances, and of as many more that were left by
    their clients and wait for their place to be taken. An utterance without its state is computed from fewer
    blocks before each window, which moves its sound by some steps of 16 bits.
    """
    config = demo_config(family)
    if failing:
        config["model_family"] = f"tests.faults.failing_family:{family.name}"
        for stage in config["stages"].values():
            stage["engine_args"]["worker_extension_cls"] = "tests.faults.engine_side.WorkerExtension"
    if num_clients:
        code2wav = config["stages"]["code2wav"]
        code2wav["max_streams"] = max(2 * num_clients, code2wav["max_num_seqs"])
    if replicas > 1:
        for stage in config["stages"].values():
            stage["replicas"] = replicas
    config["supervision"] = supervision
    path.write_text(yaml.safe_dump(config))
    return path


class SupervisedServer(ServerProcess):
    """Beside what the parent class offers."""

    @property
    def engines(self) -> list[str]:
        """The names of all replicas of all stages, as the log tells them."""
        return list(dict.fromkeys(name for name, _ in _RUNS.findall(self.log)))

    def pid_of(self, stage: str) -> int:
        """As the log tells it; the last one counts."""
        return int(dict(_RUNS.findall(self.log))[stage])

    def signal(self, stage: str, number: signal.Signals) -> None:
        os.kill(self.pid_of(stage), number)

    def kill(self) -> None:
        """The server alone. Returns when all of its processes have ended."""
        tree = self.process_tree()
        self.process.kill()
        self.process.wait()
        wait_until(lambda: not any(map(is_running, tree)), END_TIMEOUT_S)

    def ready_code(self, client: httpx2.Client) -> str | None:
        """The error code of `/ready`, None if it is 200."""
        response = client.get("/ready")
        return None if response.status_code == 200 else str(response.json()["error"]["code"])

    def wait_until_down(self, client: httpx2.Client, stage: str) -> None:
        wait_until(
            lambda: self.ready_code(client) == f"{stage}_down", ANSWER_TIMEOUT_S, lambda: self.log[-5000:]
        )

    def wait_until_up(self, client: httpx2.Client) -> None:
        wait_until(lambda: self.ready_code(client) is None, RECOVERY_TIMEOUT_S, lambda: self.log[-5000:])

    def baseline(self, client: httpx2.Client) -> dict[str, float]:
        """What must be the same whenever the server is idle, whatever happened before."""
        process = Path(f"/proc/{self.process.pid}")
        threads = list[str]()
        for task in (process / "task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                threads.append((task / "comm").read_text())
        return levels(client) | {
            "file descriptors": len(list((process / "fd").iterdir())),
            "threads of sockets": sum(name.startswith("ZMQ") for name in threads),
            "processes": len(self.process_tree()),
            "files in shared memory": len(self.shared_inodes()),
        }

    def num_threads(self) -> int:
        """Of the server process. asyncio's pool starts some when they are first needed, and keeps them."""
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))

    def wait_for_baseline(self, client: httpx2.Client, wanted: dict[str, float]) -> None:
        def difference() -> dict[str, tuple[float, float]]:
            now = self.baseline(client)
            return {name: (wanted[name], now[name]) for name in wanted if now[name] != wanted[name]}

        wait_until(lambda: not difference(), 30, lambda: f"wanted and found: {difference()}")


def samples(client: httpx2.Client) -> dict[str, float]:
    """All of `/metrics` by name and labels."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
    }


def levels(client: httpx2.Client) -> dict[str, float]:
    """What requests take, and give back."""
    taken = (
        "vllm:num_requests",
        "vllm:kv_cache",
        "omni_active",
        "omni_shared_memory_slots",
        "omni_queue",
        "omni_stage_up",
    )
    return {
        name: v for name, v in samples(client).items() if name.startswith((*taken, "omni_requests_running"))
    }


@contextmanager
def stopped(server: SupervisedServer, *stages: str) -> Iterator[None]:
    """Their engines, inside of the block."""
    for stage in stages:
        server.signal(stage, signal.SIGSTOP)
    try:
        yield
    finally:
        for stage in stages:
            server.signal(stage, signal.SIGCONT)


class Listening:
    """A streamed answer that a test follows."""

    def __init__(self, client: httpx2.Client, body: Any, path: str = URL) -> None:
        self._context = client.stream("POST", path, json=body, timeout=ANSWER_TIMEOUT_S)
        self._response = self._context.__enter__()
        assert self._response.status_code == 200
        self._lines = (line for line in self._response.iter_lines() if line.startswith("data: "))
        self.received: list[str] = []

    def until(self, part: str) -> None:
        """Returns with the first event that holds `part`."""
        for line in self._lines:
            self.received.append(line)
            if part in line:
                return
        raise AssertionError(f"no {part} in {self.received[-2:]}")

    def leave(self) -> None:
        """As a client that has heard enough."""
        self._context.__exit__(None, None, None)

    def rest(self) -> dict[str, Any]:
        """The last event before `[DONE]` or the end."""
        try:
            self.received += self._lines
        finally:
            self._context.__exit__(None, None, None)
        payloads = [line.removeprefix("data: ") for line in self.received]
        last: dict[str, Any] = json.loads(payloads[-2] if payloads[-1] == "[DONE]" else payloads[-1])
        return last
