"""The talker as a vLLM model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized
from vllm.engine.arg_utils import EngineArgs

from omni_server.protocol.runtime_config import StageRuntimeConfig
from stages.qwen2_5_omni.hf_overrides import talker_config
from stages.qwen2_5_omni.rope_attention import RopeAttention
from stages.qwen2_5_omni.talker import Qwen2_5OmniTalker
from tests.checkpoints.write import make_demo_checkpoint


def config_of(folder: Path, **kwargs: Any) -> VllmConfig:
    engine_args = EngineArgs(
        str(make_demo_checkpoint(folder / "checkpoint")),
        hf_overrides=talker_config,
        dtype="float32",
        enable_prompt_embeds=True,
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=32,
        max_model_len=64,
        **kwargs,
    )
    return engine_args.create_engine_config()


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    return config_of(tmp_path)


def talker_of(config: VllmConfig) -> Qwen2_5OmniTalker:
    with set_current_vllm_config(config):
        ensure_model_parallel_initialized(1, 1)
        return Qwen2_5OmniTalker(vllm_config=config)


@pytest.fixture
def talker(config: VllmConfig, alone: None) -> Qwen2_5OmniTalker:
    return talker_of(config)


def test_the_compiled_part_reads_the_very_buffers_that_the_runner_fills(
    talker: Qwen2_5OmniTalker, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA graphs of its pieces read from where these lay when they were captured, whatever is passed
    later."""
    embeds = torch.zeros(8, config.model_config.get_inputs_embeds_size())
    positions = torch.zeros(3, 9, dtype=torch.int64)[:, :8]
    read = []

    def compiled(*args: torch.Tensor | None) -> torch.Tensor:
        read.extend(arg.data_ptr() for arg in args if arg is not None)
        return torch.zeros(8, config.model_config.get_hidden_size())

    monkeypatch.setattr(talker.model, "forward", compiled)
    talker(None, positions, None, embeds)
    assert read == [positions.data_ptr(), embeds.data_ptr()]


@pytest.mark.parametrize("decoding_kernels", [True, False])
def test_attention_is_the_operator_where_the_stage_may_have_its_own_kernels_and_else_vllms(
    tmp_path: Path, alone: None, decoding_kernels: bool
) -> None:
    """With the same weights under the same names."""
    plain = talker_of(config_of(tmp_path))
    stage = StageRuntimeConfig(model_dir=str(tmp_path), decoding_kernels=decoding_kernels)
    config = config_of(tmp_path / "of-a-stage", additional_config=stage)
    made = talker_of(config)
    attentions = [layer.self_attn for layer in made.model.layers]
    assert {isinstance(attention, RopeAttention) for attention in attentions} == {decoding_kernels}
    assert made.model.attentions == (attentions if decoding_kernels else [])
    assert {name: weight.shape for name, weight in made.named_parameters()} == {
        name: weight.shape for name, weight in plain.named_parameters()
    }
