"""The talker as a vLLM model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs

from stages.qwen2_5_omni.demo_checkpoint import make_demo_checkpoint
from stages.qwen2_5_omni.talker import Qwen2_5OmniTalker
from stages.qwen2_5_omni.talker_config import talker_config


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    engine_args = EngineArgs(
        str(make_demo_checkpoint(tmp_path / "checkpoint")),
        hf_overrides=talker_config,
        dtype="float32",
        enable_prompt_embeds=True,
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=32,
        max_model_len=64,
    )
    return engine_args.create_engine_config()


@pytest.fixture
def talker(config: VllmConfig, tmp_path: Path) -> Iterator[Qwen2_5OmniTalker]:
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        yield Qwen2_5OmniTalker(vllm_config=config)
    cleanup_dist_env_and_memory()


def test_the_compiled_part_reads_the_very_buffers_that_the_runner_fills(
    talker: Qwen2_5OmniTalker, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA graphs of its pieces read from where these lay when they were captured, whatever is passed later."""
    embeds = torch.zeros(8, config.model_config.get_inputs_embeds_size())
    positions = torch.zeros(3, 9, dtype=torch.int64)[:, :8]
    read = []

    def compiled(*args: torch.Tensor | None) -> torch.Tensor:
        read.extend(arg.data_ptr() for arg in args if arg is not None)
        return torch.zeros(8, config.model_config.get_hidden_size())

    monkeypatch.setattr(talker.model, "forward", compiled)
    talker(None, positions, None, embeds)
    assert read == [positions.data_ptr(), embeds.data_ptr()]
