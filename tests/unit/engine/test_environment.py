"""What the launcher tells vLLM through the environment that the engines inherit."""

import fcntl
import os
import stat
import tempfile
from pathlib import Path

import pytest

from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.config.stage_config import StageConfig
from omni_server.engine.environment import set_engine_environment
from omni_server.engine.private_folder import PREFIX, sweep_dead_folders

LOOPBACK = "lo"
CPU = load_stage_config(find_shipped_config("qwen2_5_omni.demo-cpu"))
CUDA = load_stage_config(find_shipped_config("qwen2_5_omni"))
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """In place of the process's own."""
    variables: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", variables)
    return variables


@pytest.mark.parametrize(("config", "runner"), [(CPU, "0"), (CUDA, "1")], ids=["cpu", "cuda"])
def test_the_model_runner_is_v2_on_a_gpu(environment: dict[str, str], config: StageConfig, runner: str) -> None:
    set_engine_environment(config)
    assert environment[RUNNER] == runner


@pytest.mark.parametrize("config", [CPU, CUDA], ids=["cpu", "cuda"])
@pytest.mark.parametrize("value", ["0", "1"])
def test_the_operators_choice_of_a_model_runner_stands(
    environment: dict[str, str], config: StageConfig, value: str
) -> None:
    environment[RUNNER] = value
    set_engine_environment(config)
    assert environment[RUNNER] == value


def test_engines_talk_where_no_other_user_and_no_other_machine_hears_them(environment: dict[str, str]) -> None:
    set_engine_environment(CPU)
    folder = Path(environment["VLLM_RPC_BASE_PATH"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.geteuid()
    assert environment["GLOO_SOCKET_IFNAME"] == LOOPBACK
    set_engine_environment(CUDA)
    assert environment["VLLM_RPC_BASE_PATH"] == str(folder)


def test_what_a_killed_server_has_left_is_swept_and_what_a_living_one_has_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, living = (tmp_path / f"{PREFIX}{name}" for name in ("1-left", "2-living"))
    for folder in (left, living):
        folder.mkdir()
        (folder / "socket").touch()
    lock = os.open(living, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    sweep_dead_folders()
    os.close(lock)
    assert not left.exists()
    assert (living / "socket").exists()
