"""The environment that an engine's process gets."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.utils.torch_utils import OMP_NUM_THREADS_SET_BY_VLLM, available_cpu_count
from vllm.v1.engine.async_llm import AsyncLLM

from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.config.stage_config import StageConfig
from omni_server.config.stages import ArStage
from omni_server.engine import launcher
from omni_server.engine.construction import BuiltEngine
from omni_server.engine.engine_processes import EngineProcesses
from omni_server.engine.environment import VISIBLE_DEVICES
from omni_server.engine.launcher import EngineBuilder
from omni_server.engine.mps import MpsDaemon
from omni_server.engine.process_files import TempFolder
from omni_server.engine.start_progress import StartProgress
from omni_server.errors import ConfigError
from omni_server.family import ModelFamily
from omni_server.protocol.runtime_config import QueueSpec
from stages.qwen2_5_omni.family import PIPELINE

CONFIG = load_stage_config(find_shipped_config("qwen2_5_omni.demo-cpu"))


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Of each engine that is built."""
    built: list[dict[str, str]] = []

    async def build_engine(*_: Any, environment: dict[str, str], **__: Any) -> BuiltEngine:
        built.append(environment)
        return BuiltEngine(cast(AsyncLLM, SimpleNamespace(renderer=None)), cast(EngineProcesses, None))

    monkeypatch.setattr(launcher, "build_engine", build_engine)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv(OMP_NUM_THREADS_SET_BY_VLLM, raising=False)
    return built


def builder_in(folder: Path, mps: object = None, config: StageConfig = CONFIG) -> EngineBuilder:
    temp = SimpleNamespace(path=folder, check_room=lambda: None, variables=lambda: {"TMPDIR": str(folder)})
    family = SimpleNamespace(hf_overrides=lambda stage: None)
    return EngineBuilder(
        folder,
        config,
        cast(ModelFamily, family),
        queues={("thinker", "talker"): (QueueSpec(4, None, 64, 8, 1),)},
        temp=cast(TempFolder, temp),
        mps=cast(MpsDaemon, mps),
        load_format="dummy",
    )


async def build(builder: EngineBuilder) -> None:
    with StartProgress(lambda line: None) as progress:
        await builder.build("thinker", progress)


async def test_engines_share_the_cores_while_they_load_and_vllm_may_reduce_them_later(
    environments: list[dict[str, str]], tmp_path: Path
) -> None:
    await build(builder_in(tmp_path))
    assert environments[0]["OMP_NUM_THREADS"] == str(max(1, available_cpu_count() // len(CONFIG.stages)))
    assert environments[0][OMP_NUM_THREADS_SET_BY_VLLM] == "1"
    assert environments[0]["TMPDIR"] == str(tmp_path)
    assert not os.environ.keys() & {"OMP_NUM_THREADS", OMP_NUM_THREADS_SET_BY_VLLM}, (
        "the server goes on as it was"
    )


FOLDER_FAMILY = SimpleNamespace(
    pipeline=replace(
        PIPELINE, stages=PIPELINE.stages | {"talker": replace(PIPELINE.stages["talker"], folder="speaker")}
    )
)


async def test_a_stage_may_have_its_weights_in_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built: dict[str, tuple[str, str]] = {}

    async def build_engine(name: str, _: Any, arguments: Any, **__: Any) -> BuiltEngine:
        built[name] = arguments.model, arguments.additional_config.model_dir
        return BuiltEngine(cast(AsyncLLM, SimpleNamespace(renderer=None)), cast(EngineProcesses, None))

    monkeypatch.setattr(launcher, "build_engine", build_engine)
    (tmp_path / "speaker").mkdir()
    builder = builder_in(tmp_path)
    builder.config = CONFIG.model_copy(update={"model_family": f"{__name__}:FOLDER_FAMILY"})
    with StartProgress(lambda line: None) as progress:
        for name in ("thinker", "talker"):
            await builder.build(name, progress)
    assert built == {"thinker": (str(tmp_path),) * 2, "talker": (str(tmp_path / "speaker"),) * 2}


async def test_threads_that_the_operator_has_set_stay(
    environments: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    await build(builder_in(tmp_path))
    assert environments[0]["OMP_NUM_THREADS"] == "3"
    assert OMP_NUM_THREADS_SET_BY_VLLM not in environments[0]


async def test_engines_are_clients_of_the_servers_mps(
    environments: list[dict[str, str]], tmp_path: Path
) -> None:
    await build(builder_in(tmp_path, SimpleNamespace(variables={"CUDA_MPS_PIPE_DIRECTORY": "/pipes"})))
    assert environments[0]["CUDA_MPS_PIPE_DIRECTORY"] == "/pipes"


EIGHT = "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f,GPU-g,GPU-h"


@pytest.mark.parametrize(
    ("visible", "devices", "seen"),
    [
        (None, [0, 1], ["0", "1"]),
        ("", [0, 1], ["0", "1"]),
        ("5", [0], ["5", "5"]),
        ("4,5,6,7", [3, 1], ["7", "5"]),
        (EIGHT, [0, 7], ["GPU-a", "GPU-h"]),
    ],
)
async def test_each_replica_sees_its_own_device_only(
    environments: list[dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    devices: list[int],
    seen: list[str],
) -> None:
    """So it is device 0 to each of them: the code that one of them has compiled runs in the others."""
    monkeypatch.delenv(VISIBLE_DEVICES, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE_DEVICES, visible)
    for environment in await environments_of_thinkers(tmp_path, environments, replicas=2, devices=devices):
        assert environment[VISIBLE_DEVICES] == seen.pop(0)
    assert not seen


async def test_the_ranks_of_a_replica_see_the_devices_of_all_of_them(
    environments: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE_DEVICES, "4,5,6,7")
    built = await environments_of_thinkers(
        tmp_path, environments, replicas=2, devices=[0, 1, 2, 3], tensor_parallel_size=2
    )
    assert [environment[VISIBLE_DEVICES] for environment in built] == ["4,5", "6,7"]


async def test_a_device_that_the_operator_has_hidden_is_named(
    environments: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE_DEVICES, "1")
    with pytest.raises(ConfigError, match=r"device 1, counted from 0, and CUDA_VISIBLE_DEVICES=1 makes 1"):
        await environments_of_thinkers(tmp_path, environments, replicas=2, devices=[0, 1])


async def test_an_instance_of_a_partitioned_gpu_beside_another_is_refused(
    environments: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA shows a process only one instance, the first."""
    monkeypatch.setenv(VISIBLE_DEVICES, "MIG-a,MIG-b")
    with pytest.raises(ConfigError, match="one instance of a partitioned GPU"):
        await environments_of_thinkers(tmp_path, environments, replicas=2, devices=[0, 1])


async def test_engines_on_a_cpu_keep_the_servers_devices(
    environments: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE_DEVICES, "4,5")
    await build(builder_in(tmp_path))
    assert environments[0][VISIBLE_DEVICES] == "4,5"


async def environments_of_thinkers(
    folder: Path, environments: list[dict[str, str]], **fields: object
) -> list[dict[str, str]]:
    thinker = CONFIG.stages["thinker"].model_copy(update=fields)
    assert isinstance(thinker, ArStage)
    config = CONFIG.model_copy(update={"platform": "cuda", "stages": {**CONFIG.stages, "thinker": thinker}})
    builder = builder_in(folder, config=config)
    builder.queues = {("thinker", "talker"): builder.queues["thinker", "talker"] * thinker.replicas}
    with StartProgress(lambda line: None) as progress:
        for number in range(thinker.replicas):
            await builder.build("thinker", progress, number)
    return environments


async def test_what_vllm_sets_in_this_process_does_not_reach_the_engine_of_a_restart(
    environments: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = builder_in(tmp_path)
    await build(builder)
    monkeypatch.setenv("LD_PRELOAD", "libtcmalloc.so")
    await build(builder)
    assert environments[0] == environments[1]
