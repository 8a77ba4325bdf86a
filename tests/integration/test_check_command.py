"""What `omni-server check` reckons, against what the real server takes."""

import json
from pathlib import Path

import pytest

from omni_server.cli.main import main
from tests.integration.server_process import ServerProcess


def test_the_queues_take_the_shared_memory_that_was_reckoned(
    server: ServerProcess, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(checkpoint), "--json", "--stage-config", "qwen2_5_omni.demo-cpu"]) == 0
    reckoned = json.loads(capsys.readouterr().out)["shared_memory_needed"]
    queues = Path("/dev/shm").glob(f"omni-server-{server.process.pid}-*")
    assert reckoned == sum(queue.stat().st_size for queue in queues) > 0
