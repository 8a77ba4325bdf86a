"""Rows O01 to O10: probes, start and end of the server, its description and its log."""

import subprocess
import sys
from pathlib import Path

from tests.integration.checklist.curl import Curl
from tests.integration.server_process import ROOT, ServerProcess


def test_o05_version_and_load(curl: Curl) -> None:
    assert curl.get("/version").json()["version"]
    assert curl.get("/load").json().keys() == {"server_load"}


def failing_start(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "omni_server.cli.entry", "serve", *arguments]
    return subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
    )


def test_o08_port_in_use_ends_the_start_before_anything_is_loaded(
    server: ServerProcess, checkpoint: Path
) -> None:
    port = server.url.rpartition(":")[2]
    finished = failing_start(str(checkpoint), "--stage-config", "qwen2_5_omni.demo-cpu", "--port", port)
    assert finished.returncode != 0
    lines = (finished.stdout + finished.stderr).splitlines()
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in lines[-1]
    assert not [line for line in lines if "EngineCore" in line or "Traceback" in line]
