"""The Multi-Process Service daemon, with a stand-in for NVIDIA's program."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from vllm.platforms import current_platform

from omni_server.config.stage_config import StageConfig
from omni_server.engine.environment import VISIBLE_DEVICES
from omni_server.engine.mps import CONTROL, PIPE_VARIABLE, start_mps
from omni_server.errors import ConfigError
from tests.unit.config.deployment import deployment

WORKING = """
    import os, signal, sys, time
    directory = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
    open(directory + "/pid", "w").write(str(os.getpid()))
    open(directory + "/devices", "w").write(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    open(directory + "/control", "w").close()
    time.sleep(60)
"""


def is_running(pid: int) -> bool:
    """A zombie, which only its parent can take away, has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def config(**fields: object) -> StageConfig:
    return StageConfig.model_validate(deployment() | {"platform": "cuda"} | fields)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a program under the daemon's name on the PATH."""

    def put(source: str) -> None:
        program = tmp_path / CONTROL
        program.write_text(f"#!{sys.executable}\n{textwrap.dedent(source)}")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    monkeypatch.delenv(PIPE_VARIABLE, raising=False)
    monkeypatch.delenv(VISIBLE_DEVICES, raising=False)
    return put


def test_children_are_clients_of_a_daemon_that_leaves_nothing_behind(install, tmp_path: Path) -> None:
    install(WORKING)
    daemon = start_mps(config(), tmp_path)
    assert daemon is not None
    assert daemon.variables[PIPE_VARIABLE] == str(daemon.directory)
    pid = int((daemon.directory / "pid").read_text())
    assert is_running(pid)
    daemon.stop()
    assert not is_running(pid)
    assert not daemon.directory.exists()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, None),
        ("1", "GPU-b"),
        ("2,1", "GPU-c,GPU-b"),
        ("GPU-b,GPU-c", "GPU-b,GPU-c"),
        ("MIG-a", "MIG-a"),
    ],
)
def test_daemon_and_clients_name_the_visible_devices_alike(
    install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: str | None
) -> None:
    """The daemon numbers its devices anew. A number in its environment and in a client's is applied twice."""
    install(WORKING)
    if visible is not None:
        monkeypatch.setenv(VISIBLE_DEVICES, visible)
        numbers = [int(number) for number in visible.split(",") if number.isdecimal()]
        monkeypatch.setattr(current_platform, "device_count", lambda: len(numbers))
        monkeypatch.setattr(current_platform, "get_device_uuid", lambda n: f"GPU-{'abc'[numbers[n]]}")
    daemon = start_mps(config(), tmp_path)
    assert daemon is not None
    of_daemon = (daemon.directory / "devices").read_text()
    daemon.stop()
    of_clients = (dict(os.environ) | daemon.variables).get(VISIBLE_DEVICES)
    assert of_clients == expected
    assert of_daemon == ("all" if expected is None else expected)


def test_the_daemon_ends_with_a_killed_server(install, tmp_path: Path) -> None:
    install(WORKING)
    script = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(Path.cwd())!r})
from tests.unit.engine.test_mps import config
from omni_server.engine.mps import start_mps
print(start_mps(config(), Path({str(tmp_path)!r})).directory, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid = int((Path(server.stdout.readline().strip()) / "pid").read_text())
        server.kill()
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(pid)


@pytest.mark.parametrize(
    "fields",
    [{"mps": "off"}, {"platform": "cpu"}],
    ids=["off", "cpu"],
)
def test_no_daemon_where_none_is_wanted(install, tmp_path: Path, fields: dict[str, object]) -> None:
    install(WORKING)
    assert start_mps(config(**fields), tmp_path) is None


def test_no_daemon_for_stages_that_share_no_device(install, tmp_path: Path) -> None:
    install(WORKING)
    content = deployment()
    for index, stage in enumerate(content["stages"].values()):
        stage["devices"] = [index]
    assert start_mps(StageConfig.model_validate(content | {"platform": "cuda"}), tmp_path) is None


def test_a_service_of_the_operator_is_used_instead(
    install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(WORKING)
    monkeypatch.setenv(PIPE_VARIABLE, "/run/mps")
    assert start_mps(config(), tmp_path) is None


@pytest.mark.parametrize("source", [None, "raise SystemExit(1)"], ids=["not installed", "does not start"])
def test_auto_goes_on_without_it_and_on_refuses(
    install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None
) -> None:
    if source is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        install(source)
    assert start_mps(config(), tmp_path) is None
    with pytest.raises(ConfigError, match="mps"):
        start_mps(config(mps="on"), tmp_path)
