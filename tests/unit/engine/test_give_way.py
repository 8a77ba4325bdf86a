"""Who is told to give way to code2wav when engines start."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from omni_server.config.stage_config import StageConfig
from omni_server.engine import fork_server, launcher
from omni_server.engine.construction import BuiltEngine
from omni_server.engine.engine_processes import EngineProcesses
from omni_server.engine.give_way import give_way_specs
from omni_server.engine.launcher import start_engines
from omni_server.family import FamilyModel, ModelFamily
from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from omni_server.protocol.give_way import GiveWaySpec
from omni_server.protocol.runtime_config import StageRuntimeConfig
from tests.unit.config.deployment import deployment


def config(
    *low: str, platform: str = "cuda", devices: dict[str, list[int]] | None = None, **fields: object
) -> StageConfig:
    """All stages on one device unless `devices` says otherwise; those in `low` have low priority."""
    content = deployment() | {"platform": platform, "mps": "off"} | fields
    for name, stage in content["stages"].items():
        stage["gpu_priority"] = "low" if name in low else "normal"
        stage["devices"] = (devices or {}).get(name, [0])
    content["edges"][0]["queue"] = {"transport": "inline"}
    return StageConfig.model_validate(content)


def giving_way(stages: StageConfig) -> set[str]:
    return set(give_way_specs(stages))


def test_stages_of_low_priority_give_way_and_no_others() -> None:
    assert giving_way(config()) == set()
    assert giving_way(config("thinker")) == {"thinker"}
    assert giving_way(config("thinker", "talker")) == {"thinker", "talker"}


def test_a_stage_gives_way_only_where_it_shares_a_device_with_code2wav() -> None:
    assert giving_way(config("thinker", devices={"code2wav": [1]})) == set()
    assert giving_way(config("thinker", "talker", devices={"thinker": [1]})) == {"talker"}


def test_one_device_of_several_is_enough() -> None:
    ranks = deployment()
    ranks["stages"]["thinker"] |= {"devices": [0, 1], "tensor_parallel_size": 2, "gpu_priority": "low"}
    ranks["stages"]["code2wav"]["devices"] = [1]
    assert giving_way(StageConfig.model_validate(ranks | {"platform": "cuda"})) == {"thinker"}


def test_nobody_gives_way_to_a_code2wav_of_low_priority() -> None:
    assert giving_way(config("thinker", "code2wav")) == set()


def test_a_stage_with_a_step_interval_is_told_of_batches_and_pauses_only_if_it_is_low() -> None:
    content = deployment() | {"platform": "cuda", "mps": "off"}
    for name in content["stages"]:
        content["stages"][name]["devices"] = [0]
    content["stages"]["talker"] |= {"step_interval_per_stream_ms": 0.5, "max_num_seqs": 7}
    content["stages"]["thinker"] |= {
        "step_interval_per_stream_ms": 0.25,
        "max_num_seqs": 9,
        "gpu_priority": "low",
    }
    specs = give_way_specs(StageConfig.model_validate(content))
    intervals = {
        name: (spec.pauses, spec.step_interval_per_stream_s, spec.max_streams) for name, spec in specs.items()
    }
    assert intervals == {"talker": (False, 0.0005, 7), "thinker": (True, 0.00025, 9)}


def test_nobody_gives_way_on_a_cpu() -> None:
    assert giving_way(config("thinker", platform="cpu")) == set()


def test_a_thinker_alone_gives_way_to_nobody() -> None:
    alone = deployment()
    alone["stages"] = {"thinker": alone["stages"]["thinker"] | {"gpu_priority": "low"}}
    assert giving_way(StageConfig.model_validate(alone | {"platform": "cuda", "edges": []})) == set()


def test_every_stage_and_every_start_has_a_socket_of_its_own() -> None:
    stages = config("thinker", "talker")
    sockets = [spec.socket for _ in range(3) for spec in give_way_specs(stages).values()]
    assert len(set(sockets)) == 6


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, AsyncEngineArgs]:
    """The arguments of every engine that is built, by the name under which its worker reports."""
    arguments: dict[str, AsyncEngineArgs] = {}

    async def build_engine(
        name: str, _: type, engine_args: AsyncEngineArgs, **__: object
    ) -> BuiltEngine[AsyncLLM]:
        runtime = engine_args.additional_config
        assert isinstance(runtime, StageRuntimeConfig | DiffusionRuntimeConfig)
        assert runtime.progress is not None
        arguments[runtime.progress.stage] = engine_args
        client = SimpleNamespace(
            output_processor=SimpleNamespace(), model_config=SimpleNamespace(max_model_len=8192)
        )
        return BuiltEngine(cast(AsyncLLM, client), cast(EngineProcesses, None))

    monkeypatch.setattr(launcher, "build_engine", build_engine)
    monkeypatch.setattr(fork_server, "start", lambda family: None)
    return arguments


async def runtimes(
    stages: StageConfig, arguments: dict[str, AsyncEngineArgs], folder: Path
) -> tuple[dict[str, GiveWaySpec | None], tuple[GiveWaySpec, ...]]:
    """Where each autoregressive stage listens, and whom code2wav tells."""
    family = SimpleNamespace(register=lambda: None, hf_overrides=lambda stage: lambda hf_config: hf_config)
    await start_engines(
        folder,
        stages,
        cast(ModelFamily, family),
        cast(
            FamilyModel, SimpleNamespace(row_width=8, extra_rows_per_request=0, dtype_name=lambda: "float32")
        ),
        load_format="dummy",
        on_progress=lambda line: None,
    )
    configs: dict[str, Any] = {name: args.additional_config for name, args in arguments.items()}
    code2wav = configs.pop("code2wav")
    return {name: runtime.gives_way for name, runtime in configs.items()}, code2wav.announces_to


async def test_code2wav_tells_exactly_those_who_listen(
    started: dict[str, AsyncEngineArgs], tmp_path: Path
) -> None:
    listening, told = await runtimes(config("thinker", "talker"), started, tmp_path)
    assert None not in listening.values()
    assert len(told) == 2
    assert set(told) == set(listening.values())


async def test_a_stage_of_normal_priority_does_not_listen(
    started: dict[str, AsyncEngineArgs], tmp_path: Path
) -> None:
    listening, told = await runtimes(config("thinker"), started, tmp_path)
    assert listening["talker"] is None
    assert told == (listening["thinker"],)


@pytest.mark.parametrize(
    "stages",
    [config(), config("thinker", platform="cpu"), config("thinker", devices={"code2wav": [1]})],
    ids=["no low priority", "cpu", "another device"],
)
async def test_otherwise_nobody_listens_and_nobody_is_told(
    started: dict[str, AsyncEngineArgs], tmp_path: Path, stages: StageConfig
) -> None:
    assert await runtimes(stages, started, tmp_path) == ({"thinker": None, "talker": None}, ())
