"""What the launcher tells vLLM through the environment that the engines inherit."""

import os

import pytest

from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.config.stage_config import StageConfig
from omni_server.engine.environment import set_engine_environment
from omni_server.errors import ConfigError

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
def test_the_model_runner_is_v2_on_a_gpu(
    environment: dict[str, str], config: StageConfig, runner: str
) -> None:
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


def test_ranks_find_each_other_where_no_other_machine_hears_them(environment: dict[str, str]) -> None:
    set_engine_environment(CPU)
    assert environment["GLOO_SOCKET_IFNAME"] == LOOPBACK


def test_a_folder_for_compiled_code_that_cannot_be_made_is_named(environment: dict[str, str]) -> None:
    """Before torch fails to be imported for it."""
    environment["TORCHINDUCTOR_CACHE_DIR"] = "/proc/sys/nothing"
    with pytest.raises(ConfigError, match=r"/proc/sys/nothing cannot be made .*set TORCHINDUCTOR_CACHE_DIR"):
        set_engine_environment(CPU)


def test_nothing_is_compiled_where_no_model_is(environment: dict[str, str]) -> None:
    """vLLM would compile helpers of its sampler when the first request needs them."""
    set_engine_environment(CPU)
    assert environment["TORCHDYNAMO_DISABLE"] == "1"
    environment.clear()
    thinker = CPU.stages["thinker"].model_copy(update={"engine_args": {}})
    set_engine_environment(CPU.model_copy(update={"stages": {**CPU.stages, "thinker": thinker}}))
    assert "TORCHDYNAMO_DISABLE" not in environment
