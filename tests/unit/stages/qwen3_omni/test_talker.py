"""The talker as a vLLM model, but for its decoder, which tests/integration/test_frames.py compares."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerResizeMLP
from vllm import ModelRegistry
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from omni_server.errors import ConfigError
from omni_server.protocol.runtime_config import StageRuntimeConfig
from stages.qwen3_omni.hf_overrides import talker_config
from stages.qwen3_omni.talker import Qwen3OmniTalker
from stages.qwen_codec import code_predictor
from stages.qwen_codec.decoder_kernels import KernelOperations
from stages.qwen_codec.frame_talker import TextRows
from tests.checkpoints.write import make_demo_checkpoint

VOCABULARY, THINKER_WIDTH, INNER, WIDTH = 9000, 24, 40, 16
"""More rows than are projected at once."""


def test_the_row_of_a_text_id_is_its_projected_embedding() -> None:
    torch.manual_seed(0)
    rows = TextRows(VOCABULARY, THINKER_WIDTH, INNER, WIDTH)
    text_config = PreTrainedConfig(intermediate_size=INNER, hidden_size=WIDTH, hidden_act="silu")
    config = SimpleNamespace(thinker_hidden_size=THINKER_WIDTH, text_config=text_config)
    reference = Qwen3OmniMoeTalkerResizeMLP(config)
    reference.load_state_dict(rows.projection.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(rows.table(), reference(rows.embedding.weight))


# -- the whole model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_checkpoint(tmp_path_factory.mktemp("small") / "checkpoint", family="qwen3_omni")


@pytest.fixture
def config(checkpoint: Path) -> VllmConfig:
    return engine_config(checkpoint, load_format="dummy")


def engine_config(folder: Path, **engine_args: Any) -> VllmConfig:
    ModelRegistry.register_model(Qwen3OmniTalker.__name__, Qwen3OmniTalker)
    return EngineArgs(
        str(folder),
        **engine_args,
        hf_overrides=talker_config,
        dtype="float32",
        enable_prompt_embeds=True,
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=32,
        max_model_len=64,
        max_num_seqs=4,
    ).create_engine_config()


@contextmanager
def unloaded(config: VllmConfig, folder: Path) -> Iterator[Qwen3OmniTalker]:
    init_distributed_environment(1, 0, f"file://{folder}/store", 0, backend="gloo")
    try:
        with set_current_vllm_config(config):
            ensure_model_parallel_initialized(1, 1)
            yield Qwen3OmniTalker(vllm_config=config)
    finally:
        cleanup_dist_env_and_memory()


@pytest.fixture
def talker(config: VllmConfig, tmp_path: Path) -> Iterator[Qwen3OmniTalker]:
    """With vLLM's dummy weights, which are not loaded by the model itself."""
    with unloaded(config, tmp_path) as made:
        DummyModelLoader(config.load_config).load_weights(made, config.model_config)
        yield made


def test_dummy_weights_give_rows_too_and_nothing_of_them_is_kept(talker: Qwen3OmniTalker) -> None:
    table = talker.row_table()
    assert (table.shape[1], table.device.type) == (64, "cpu")
    assert table.isfinite().all()
    assert len(set(table[:, 0].tolist())) > 1
    assert not any(name.startswith("text_rows") for name, _ in talker.named_parameters())


@pytest.mark.parametrize("decoding_kernels", [True, False])
def test_the_code_predictor_has_our_kernels_unless_the_stage_is_to_have_vllms(
    decoding_kernels: bool, config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_predictor, "fits_decoding_kernels", lambda device: True)
    config.additional_config = StageRuntimeConfig(model_dir="", decoding_kernels=decoding_kernels)
    with unloaded(config, tmp_path) as talker:
        assert isinstance(talker.code_predictor.operations, KernelOperations) == decoding_kernels


PARTS = ["lm_head.3.weight", "model.layers.0.mlp.up_proj.weight", "model.codec_embedding.14.weight"]


@pytest.mark.parametrize("missing", [None, *PARTS])
def test_a_checkpoint_that_lacks_a_part_of_a_merged_weight_is_refused(
    missing: str | None, checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    weights = load_file(folder / "model.safetensors")
    if missing is not None:
        del weights[f"talker.code_predictor.{missing}"]
    save_file(weights, folder / "model.safetensors")
    config = engine_config(folder)
    refusal = (
        pytest.raises(ConfigError, match=rf"lacks 1 weights .*talker\.code_predictor\.{missing}")
        if missing
        else nullcontext()
    )
    with unloaded(config, tmp_path) as talker, refusal:
        get_model_loader(config.load_config).load_weights(talker, config.model_config)
