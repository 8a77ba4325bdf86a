"""The renderer that outlives an engine's client."""

from pathlib import Path

import pytest
from vllm.config import VllmConfig
from vllm.inputs import TextPrompt
from vllm.renderers import renderer_from_config

from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.config.stages import ArStage
from omni_server.engine.engine_args import ar_engine_args
from omni_server.engine.kept_renderer import kept_renderer
from omni_server.family import load_family
from omni_server.protocol.runtime_config import StageRuntimeConfig
from tests.checkpoints.write import make_demo_checkpoint


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    folder: Path = make_demo_checkpoint(tmp_path_factory.mktemp("kept") / "checkpoint", weights="dummy")
    demo = load_stage_config(find_shipped_config("qwen2_5_omni.demo-cpu"))
    stage, family = demo.stages["thinker"], load_family(demo.model_family)
    assert isinstance(stage, ArStage)
    family.register()
    return ar_engine_args(
        folder,
        stage,
        StageRuntimeConfig(str(folder)),
        platform="cpu",
        load_format="dummy",
        hf_overrides=family.hf_overrides("thinker"),
    ).create_engine_config()


async def test_a_renderer_serves_the_next_client_after_the_end_of_its_first(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    first = renderer_from_config(config)
    with kept_renderer(None):
        assert renderer_from_config(config) is not first
    with kept_renderer(first):
        assert renderer_from_config(config) is first
    assert renderer_from_config(config) is not first
    first.shutdown()
    prompt = await first.tokenize_prompt_async(TextPrompt(prompt="Hello"), first.default_cmpl_tok_params)
    assert prompt["prompt_token_ids"]
