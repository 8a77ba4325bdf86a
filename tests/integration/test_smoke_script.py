"""`scripts/smoke` against the real server, and against none."""

import shutil
import socket
import subprocess
import wave
from pathlib import Path

from tests.integration.server_process import ROOT, ServerProcess


def smoke(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "smoke", *arguments], capture_output=True, text=True, check=False
    )


def test_a_running_server_passes(server: ServerProcess, tmp_path: Path) -> None:
    assert shutil.which("curl")
    finished = smoke("--url", server.url, "--out", str(tmp_path))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.splitlines()[-1] == "all passed"
    with wave.open(str(tmp_path / "answer.wav")) as answer:
        assert answer.getnframes() > 0


def test_a_model_that_is_not_served_fails(server: ServerProcess) -> None:
    assert smoke("--url", server.url, "--model", "no-such-model").returncode != 0


def test_no_server_fails() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # taken, but nobody listens
        finished = smoke("--url", f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert finished.returncode == 1
    assert "not ready" in finished.stderr
