"""The talker as a vLLM model, but for its decoder, which tests/integration/test_frames.py compares."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedConfig, Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeTalkerResizeMLP
from vllm import ModelRegistry
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from stages.qwen3_omni.hf_overrides import TALKER, talker_config
from stages.qwen3_omni.talker import Qwen3OmniTalker, TextRows
from stages.runtime.frame_predictor import frame_predictor

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


CONFIG = {
    "thinker_config": {
        "text_config": {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1},
    },
    "talker_config": {
        "thinker_hidden_size": 32,
        "num_code_groups": 16,
        "codec_eos_token_id": 2150,
        "text_config": {
            "vocab_size": 3072,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]},
        },
        "code_predictor_config": {
            "vocab_size": 2048,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_code_groups": 16,
        },
    },
}


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    made = Qwen3OmniMoeConfig(**CONFIG)
    made.architectures = ["Qwen3OmniMoeForConditionalGeneration"]
    made.save_pretrained(tmp_path)
    ModelRegistry.register_model(TALKER, Qwen3OmniTalker)
    engine_args = EngineArgs(
        str(tmp_path),
        hf_overrides=talker_config,
        dtype="float32",
        load_format="dummy",
        enable_prompt_embeds=True,
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=32,
        max_model_len=64,
        max_num_seqs=4,
    )
    return engine_args.create_engine_config()


@pytest.fixture
def talker(config: VllmConfig, tmp_path: Path) -> Iterator[Qwen3OmniTalker]:
    """With vLLM's dummy weights, which are not loaded by the model itself."""
    init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, backend="gloo")
    with set_current_vllm_config(config):
        ensure_model_parallel_initialized(1, 1)
        made = Qwen3OmniTalker(vllm_config=config)
    DummyModelLoader(config.load_config).load_weights(made, config.model_config)
    yield made
    cleanup_dist_env_and_memory()


def test_dummy_weights_give_rows_too_and_nothing_of_them_is_kept(talker: Qwen3OmniTalker) -> None:
    table = talker.row_table()
    assert (table.shape, table.device.type) == ((300, 32), "cpu")
    assert table.isfinite().all()
    assert len(set(table[:, 0].tolist())) > 1
    assert not any(name.startswith("text_rows") for name, _ in talker.named_parameters())


def test_only_codes_and_the_end_of_speech_are_sampled(talker: Qwen3OmniTalker) -> None:
    assert (~talker.banned_ids).nonzero()[:, 0].tolist() == [*range(2048), 2150]


def test_it_predicts_the_other_codebooks_of_a_frame(talker: Qwen3OmniTalker) -> None:
    assert frame_predictor(talker, 15) is talker
    with pytest.raises(TypeError, match="predicts 15 codes per token, but the pipeline says 7"):
        frame_predictor(talker, 7)


def test_all_layers_read_the_cosines_and_sines_of_the_step(
    talker: Qwen3OmniTalker, config: VllmConfig
) -> None:
    assert config.model_config.uses_mrope
    rotary = {id(layer.self_attn.rotary_emb) for layer in talker.model.layers}
    assert rotary == {id(talker._rotary)}
