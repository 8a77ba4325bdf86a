"""Which engines are throttled while the decoder is busy, and hear of its batches."""

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
from omni_server.engine.launcher import start_engines, step_throttles
from omni_server.family import FamilyModel, ModelFamily
from omni_server.protocol.diffusion_config import DiffusionRuntimeConfig
from omni_server.protocol.runtime_config import StageRuntimeConfig, StepThrottleSpec
from tests.unit.config.deployment import deployment

INTERVAL_MS = 0.25


def config(
    *throttled: str, platform: str = "cuda", devices: dict[str, list[int]] | None = None, **fields: object
) -> StageConfig:
    """All stages on one device unless `devices` says otherwise; those in `throttled` have a step interval."""
    content = deployment() | {"platform": platform, "mps": "off"} | fields
    for name, stage in content["stages"].items():
        stage["devices"] = (devices or {}).get(name, [0])
        if name in throttled:
            stage["step_interval_per_stream_ms"] = INTERVAL_MS
    content["edges"][0]["queue"] = {"transport": "inline"}
    return StageConfig.model_validate(content)


def throttled(stages: StageConfig) -> set[str]:
    return set(step_throttles(stages))


def test_stages_with_a_step_interval_are_throttled_and_no_others() -> None:
    assert throttled(config()) == set()
    assert throttled(config("thinker")) == {"thinker"}
    assert throttled(config("thinker", "talker")) == {"thinker", "talker"}


def test_a_stage_is_throttled_only_where_it_shares_a_device_with_the_decoder() -> None:
    assert throttled(config("thinker", devices={"code2wav": [1]})) == set()
    assert throttled(config("thinker", "talker", devices={"thinker": [1]})) == {"talker"}


def test_a_replica_is_throttled_only_where_it_shares_a_device_with_a_decoder() -> None:
    content = deployment() | {"platform": "cuda", "mps": "off"}
    content["stages"]["talker"] |= {
        "devices": [0, 1, 2],
        "replicas": 3,
        "step_interval_per_stream_ms": INTERVAL_MS,
    }
    content["stages"]["code2wav"] |= {"devices": [1, 2], "replicas": 2}
    assert throttled(StageConfig.model_validate(content)) == {"talker/1", "talker/2"}


def test_one_device_of_several_is_enough() -> None:
    ranks = deployment()
    ranks["stages"]["thinker"] |= {
        "devices": [0, 1],
        "tensor_parallel_size": 2,
        "step_interval_per_stream_ms": INTERVAL_MS,
    }
    ranks["stages"]["code2wav"]["devices"] = [1]
    assert throttled(StageConfig.model_validate(ranks | {"platform": "cuda"})) == {"thinker"}


def test_a_stage_knows_its_interval_and_how_many_streams_it_works_for() -> None:
    content = deployment() | {"platform": "cuda", "mps": "off"}
    for name in content["stages"]:
        content["stages"][name]["devices"] = [0]
    content["stages"]["talker"] |= {"step_interval_per_stream_ms": 0.5, "max_num_seqs": 7}
    content["stages"]["thinker"] |= {"step_interval_per_stream_ms": 0.25, "max_num_seqs": 9}
    throttles = step_throttles(StageConfig.model_validate(content))
    intervals = {name: (spec.interval_per_stream_s, spec.max_streams) for name, spec in throttles.items()}
    assert intervals == {"talker": (0.0005, 7), "thinker": (0.00025, 9)}


def test_nobody_is_throttled_on_a_cpu() -> None:
    assert throttled(config("thinker", platform="cpu")) == set()


def test_a_language_model_alone_is_not_throttled() -> None:
    alone = deployment()
    alone["stages"] = {"thinker": alone["stages"]["thinker"] | {"step_interval_per_stream_ms": INTERVAL_MS}}
    assert throttled(StageConfig.model_validate(alone | {"platform": "cuda", "edges": []})) == set()


def test_every_stage_and_every_start_has_a_socket_of_its_own() -> None:
    stages = config("thinker", "talker")
    sockets = [spec.socket for _ in range(3) for spec in step_throttles(stages).values()]
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
            output_processor=SimpleNamespace(),
            model_config=SimpleNamespace(max_model_len=8192),
            renderer=None,
        )
        return BuiltEngine(cast(AsyncLLM, client), cast(EngineProcesses, None))

    monkeypatch.setattr(launcher, "build_engine", build_engine)
    monkeypatch.setattr(fork_server, "start", lambda family: None)
    return arguments


async def runtimes(
    stages: StageConfig, arguments: dict[str, AsyncEngineArgs], folder: Path
) -> tuple[dict[str, StepThrottleSpec | None], tuple[str, ...]]:
    """Where each autoregressive stage listens, and where code2wav sends."""
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
    return {name: runtime.step_throttle for name, runtime in configs.items()}, code2wav.announces_to


async def test_code2wav_tells_exactly_those_who_listen(
    started: dict[str, AsyncEngineArgs], tmp_path: Path
) -> None:
    listening, told = await runtimes(config("thinker", "talker"), started, tmp_path)
    assert len(told) == 2
    assert set(told) == {spec.socket for spec in listening.values() if spec is not None}


async def test_a_stage_without_an_interval_does_not_listen(
    started: dict[str, AsyncEngineArgs], tmp_path: Path
) -> None:
    listening, told = await runtimes(config("thinker"), started, tmp_path)
    assert listening["talker"] is None
    assert listening["thinker"] is not None
    assert told == (listening["thinker"].socket,)


@pytest.mark.parametrize(
    "stages",
    [config(), config("thinker", platform="cpu"), config("thinker", devices={"code2wav": [1]})],
    ids=["no interval", "cpu", "another device"],
)
async def test_otherwise_nobody_listens_and_nobody_is_told(
    started: dict[str, AsyncEngineArgs], tmp_path: Path, stages: StageConfig
) -> None:
    assert await runtimes(stages, started, tmp_path) == ({"thinker": None, "talker": None}, ())
