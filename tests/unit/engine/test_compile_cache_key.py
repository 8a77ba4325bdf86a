"""vLLM keeps compiled code by a hash of the engine's config: the next start must find it again."""

from pathlib import Path

import msgspec
import pytest

from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.config.stages import ArStage
from omni_server.engine.engine_args import ar_engine_args
from omni_server.family import load_family
from omni_server.protocol.runtime_config import QueueSpec, StageRuntimeConfig
from omni_server.protocol.start_report import ProgressSpec
from tests.checkpoints.write import make_demo_checkpoint

CONFIG = load_stage_config(find_shipped_config("qwen2_5_omni.demo-cpu"))
FAMILY = load_family(CONFIG.model_family)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_checkpoint(tmp_path_factory.mktemp("key") / "checkpoint", weights="dummy")


def key(model_dir: Path, name: str, start: int) -> str:
    """The hash of the stage's engine config as one `start` of the server makes it."""
    stage = CONFIG.stages[name]
    assert isinstance(stage, ArStage)
    queue = QueueSpec(16, f"/dev/shm/queue-{start}", 4096, 8, 1)
    runtime = StageRuntimeConfig(str(model_dir), progress=ProgressSpec(name, f"socket-{start}"))
    runtime = (
        msgspec.structs.replace(runtime, row_producer="package.module:Producer", output_queue=queue)
        if name == "thinker"
        else msgspec.structs.replace(runtime, input_queues=(queue,))
    )
    arguments = ar_engine_args(
        model_dir, stage, runtime, platform="cpu", load_format="dummy", hf_overrides=FAMILY.hf_overrides(name)
    )
    config_hash: str = arguments.create_engine_config().compute_hash()
    return config_hash


def test_a_second_start_has_the_key_of_the_first_and_stages_do_not_share_one(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    FAMILY.register()
    first = {name: key(checkpoint, name, 1) for name in ("thinker", "talker")}
    assert {name: key(checkpoint, name, 2) for name in first} == first
    assert first["thinker"] != first["talker"]
