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
from omni_server.config.pipeline import Embeddings
from omni_server.config.stages import ArStage
from omni_server.engine import launcher
from omni_server.engine.construction import BuiltEngine
from omni_server.engine.engine_processes import EngineProcesses
from omni_server.engine.launcher import EngineBuilder
from omni_server.engine.mps import MpsDaemon
from omni_server.engine.process_files import TempFolder
from omni_server.engine.start_progress import StartProgress
from omni_server.family import ModelFamily
from omni_server.protocol.runtime_config import QueueSpec, StageRuntimeConfig
from stages.qwen2_5_omni.family import PIPELINE

CONFIG = load_stage_config(find_shipped_config("qwen2_5_omni.demo-cpu"))


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Of each engine that is built."""
    built: list[dict[str, str]] = []

    async def build_engine(*_: Any, environment: dict[str, str], **__: Any) -> BuiltEngine[AsyncLLM]:
        built.append(environment)
        return BuiltEngine(
            cast(AsyncLLM, SimpleNamespace(output_processor=SimpleNamespace())), cast(EngineProcesses, None)
        )

    monkeypatch.setattr(launcher, "build_engine", build_engine)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv(OMP_NUM_THREADS_SET_BY_VLLM, raising=False)
    return built


def builder_in(folder: Path, mps: object = None) -> EngineBuilder:
    temp = SimpleNamespace(path=folder, check_room=lambda: None, variables=lambda: {"TMPDIR": str(folder)})
    family = SimpleNamespace(hf_overrides=lambda stage: None)
    return EngineBuilder(
        folder,
        CONFIG,
        cast(ModelFamily, family),
        queues={("thinker", "talker"): (QueueSpec(4, None, 64, 8, 1),)},
        temp=cast(TempFolder, temp),
        mps=cast(MpsDaemon, mps),
        load_format="dummy",
    )


async def build(builder: EngineBuilder) -> None:
    stage = CONFIG.stages["thinker"]
    assert isinstance(stage, ArStage)
    with StartProgress(lambda line: None) as progress:
        await builder.build_ar("thinker", stage, progress)


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


def speaking_family(payload: Embeddings) -> Any:
    """Declares the pipeline of `CONFIG`, with this payload between its language models."""
    edges = tuple(
        replace(edge, payload=payload) if edge.source == "thinker" else edge for edge in PIPELINE.edges
    )
    return SimpleNamespace(pipeline=replace(PIPELINE, edges=edges))


TEXT_ID_FAMILY = speaking_family(Embeddings(text_ids=True))


@pytest.mark.parametrize(
    ("family", "has_table"), [("stages.qwen2_5_omni:FAMILY", False), (f"{__name__}:TEXT_ID_FAMILY", True)]
)
async def test_a_stage_that_gets_text_as_ids_looks_up_its_rows(
    family: str, has_table: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built: dict[str, StageRuntimeConfig] = {}

    async def build_engine(name: str, _: Any, arguments: Any, **__: Any) -> BuiltEngine[AsyncLLM]:
        built[name] = arguments.additional_config
        return BuiltEngine(cast(AsyncLLM, None), cast(EngineProcesses, None))

    monkeypatch.setattr(launcher, "build_engine", build_engine)
    builder = builder_in(tmp_path)
    builder.config = CONFIG.model_copy(update={"model_family": family})
    with StartProgress(lambda line: None) as progress:
        for name in ("thinker", "talker"):
            stage = CONFIG.stages[name]
            assert isinstance(stage, ArStage)
            await builder.build_ar(name, stage, progress)
    assert {name: runtime.row_table for name, runtime in built.items()} == {
        "thinker": False,
        "talker": has_table,
    }


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
    await build(
        builder_in(tmp_path, SimpleNamespace(variables=lambda: {"CUDA_MPS_PIPE_DIRECTORY": "/pipes"}))
    )
    assert environments[0]["CUDA_MPS_PIPE_DIRECTORY"] == "/pipes"


async def test_what_vllm_sets_in_this_process_does_not_reach_the_engine_of_a_restart(
    environments: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = builder_in(tmp_path)
    await build(builder)
    monkeypatch.setenv("LD_PRELOAD", "libtcmalloc.so")
    await build(builder)
    assert environments[0] == environments[1]
