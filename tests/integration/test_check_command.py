"""What `omni-server check` reckons, against what the real server takes."""

import json
import subprocess
import sys
from pathlib import Path

from tests.integration.server_process import ROOT, ServerProcess


def test_the_queues_take_the_shared_memory_that_was_reckoned(server: ServerProcess, checkpoint: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "omni_server.cli.main",
        "check",
        str(checkpoint),
        "--json",
    ]
    finished = subprocess.run(
        [*command, "--stage-config", "configs/qwen2_5_omni.demo-cpu.yaml"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )

    assert finished.returncode == 0, finished.stdout
    queues = Path("/dev/shm").glob(f"omni-server-{server.process.pid}-*")
    assert (
        json.loads(finished.stdout)["shared_memory_needed"]
        == sum(queue.stat().st_size for queue in queues)
        > 0
    )
