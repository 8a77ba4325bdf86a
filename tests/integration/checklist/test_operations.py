"""Rows O01 to O10: probes, start and end of the server, its description and its log."""

import subprocess
import sys
from pathlib import Path

from openapi_spec_validator import OpenAPIV31SpecValidator

from tests.integration.checklist.curl import Curl
from tests.integration.checklist.guarded import KEY
from tests.integration.server_process import ROOT, ServerProcess
from tests.unit.api.clients import URL


def test_o05_version_and_load(curl: Curl) -> None:
    assert curl.get("/version").json()["version"]
    assert curl.get("/load").json().keys() == {"server_load"}


def test_o06_description_is_valid_openapi_with_errors_and_streams(guarded: ServerProcess) -> None:
    document = Curl(guarded.url, KEY).get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert list(OpenAPIV31SpecValidator(document).iter_errors()) == []
    responses = document["paths"][URL]["post"]["responses"]
    assert {"400", "401", "404", "413", "429", "500", "503"} <= responses.keys()
    assert {"application/json", "text/event-stream"} <= responses["200"]["content"].keys()
    assert "audio/mpeg" in document["paths"]["/v1/audio/speech"]["post"]["responses"]["200"]["content"]


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


def test_o09_wrong_model_path_ends_the_start_with_a_message(tmp_path: Path) -> None:
    finished = failing_start(str(tmp_path / "nothing"), "--stage-config", "qwen2_5_omni.demo-cpu")
    assert finished.returncode != 0
    assert str(tmp_path / "nothing") in finished.stderr
    assert "Traceback" not in finished.stderr
