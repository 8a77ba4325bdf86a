"""Flags of the command line that decide fields of stages."""

import pytest

from omni_server.check.stage_flags import StageFlags
from omni_server.config.load import find_shipped_config, load_stage_config, shipped_configs
from omni_server.config.stage_config import StageConfig
from omni_server.errors import ConfigError
from tests.unit.config.deployment import deployment_with


def shipped(name: str) -> StageConfig:
    return load_stage_config(find_shipped_config(name))


@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni.4gpu", "diffusers", "qwen2_5_omni.demo-cpu"])
def test_without_flags_the_config_stays_as_it_is(name: str) -> None:
    config = shipped(name)
    assert StageFlags().applied(config) == config


@pytest.mark.parametrize("name", ["qwen2_5_omni", "qwen3_omni.4gpu", "qwen3_omni.demo-cpu"])
def test_the_length_is_that_of_the_stage_that_reads_the_prompt(name: str) -> None:
    config = shipped(name)
    changed = StageFlags(max_model_len=1234).applied(config)
    lengths = {name: stage.max_model_len for name, stage in config.stages.items()}
    assert {name: stage.max_model_len for name, stage in changed.stages.items()} == lengths | {
        "thinker": 1234
    }


@pytest.mark.parametrize("name", [name for name in shipped_configs() if "cpu" not in name])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.95])
def test_the_shares_sum_to_the_flag_on_the_fullest_device_in_the_same_proportions(
    name: str, share: float
) -> None:
    config = shipped(name)
    flags = StageFlags(gpu_memory_utilization=share)
    changed = flags.applied(config)
    assert max(changed.memory_shares().values()) == pytest.approx(share)
    factors = [
        changed.stages[stage].gpu_memory_utilization / config.stages[stage].gpu_memory_utilization
        for stage in config.stages
    ]
    assert factors == pytest.approx([factors[0]] * len(factors))
    StageConfig.model_validate(changed.model_dump(by_alias=True))
    assert flags.applied(changed).memory_shares() == pytest.approx(changed.memory_shares())


@pytest.mark.parametrize(
    "document",
    [
        deployment_with("stages.thinker.devices", [0, 1]),
        deployment_with("stages.thinker.tensor_parallel_size", 2),
    ],
)
def test_the_thinker_has_as_many_ranks_as_the_flag_says_if_it_has_the_devices(
    document: dict[str, object],
) -> None:
    changed = StageFlags(tensor_parallel_size=2).applied(StageConfig.model_validate(document))
    assert [stage.num_ranks for stage in changed.stages.values()] == [2, 1, 1]
    StageConfig.model_validate(changed.model_dump(by_alias=True))


def test_on_a_cpu_ranks_need_no_devices() -> None:
    changed = StageFlags(tensor_parallel_size=2).applied(shipped("qwen2_5_omni.demo-cpu"))
    assert changed.stages["thinker"].num_ranks == 2


@pytest.mark.parametrize(
    ("flags", "name", "message"),
    [
        (StageFlags(tensor_parallel_size=2), "qwen2_5_omni", r"'devices: \[0, 1\]', or others"),
        (StageFlags(tensor_parallel_size=2), "qwen2_5_omni.2gpu", "needs 4 devices for the thinker"),
        (StageFlags(tensor_parallel_size=2), "diffusers", "samples no tokens"),
        (StageFlags(max_model_len=9), "diffusers.demo-cpu", "samples no tokens"),
        (StageFlags(gpu_memory_utilization=0.5), "qwen2_5_omni.cpu", "kv_cache_memory_bytes"),
        (StageFlags(quantization="fp8"), "qwen2_5_omni.cpu", "needs an NVIDIA GPU"),
    ],
)
def test_what_the_stages_cannot_have_is_refused_with_what_to_write(
    flags: StageFlags, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        flags.applied(shipped(name))
