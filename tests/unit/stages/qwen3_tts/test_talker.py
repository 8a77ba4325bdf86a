"""The talker as a vLLM model: the rows that it composes."""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from vllm import ModelRegistry
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from stages.qwen3_tts.hf_config import register_configs, talker_config
from stages.qwen3_tts.layout import FRAME, NONE, VECTOR, PromptRows
from stages.qwen3_tts.talker import Qwen3TTSTalker

WIDTH, PREDICTOR_WIDTH, TEXT_WIDTH, NUM_TEXT_IDS, EOS = 64, 32, 48, 100, 2150
PREDICTOR = {
    "vocab_size": 2048,
    "hidden_size": PREDICTOR_WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 1_000_000,
    "rms_norm_eps": 1e-6,
    "num_code_groups": 16,
    "model_type": "qwen3_tts_talker_code_predictor",
    "rope_scaling": None,
}
CONFIG = {
    "model_type": "qwen3_tts",
    "architectures": ["Qwen3TTSForConditionalGeneration"],
    "talker_config": {
        "model_type": "qwen3_tts_talker",
        "vocab_size": 3072,
        "hidden_size": WIDTH,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "rope_theta": 1_000_000,
        "rope_scaling": {"mrope_section": [6, 5, 5], "interleaved": True, "rope_type": "default"},
        "text_vocab_size": NUM_TEXT_IDS,
        "text_hidden_size": TEXT_WIDTH,
        "codec_eos_token_id": EOS,
        "code_predictor_config": PREDICTOR,
    },
}
SHAPES = {
    "model.norm.weight": (WIDTH,),
    "model.codec_embedding.weight": (3072, WIDTH),
    "model.text_embedding.weight": (NUM_TEXT_IDS, TEXT_WIDTH),
    "text_projection.linear_fc1.weight": (TEXT_WIDTH, TEXT_WIDTH),
    "text_projection.linear_fc1.bias": (TEXT_WIDTH,),
    "text_projection.linear_fc2.weight": (WIDTH, TEXT_WIDTH),
    "text_projection.linear_fc2.bias": (WIDTH,),
    "codec_head.weight": (3072, WIDTH),
    "code_predictor.small_to_mtp_projection.weight": (PREDICTOR_WIDTH, WIDTH),
    "code_predictor.small_to_mtp_projection.bias": (PREDICTOR_WIDTH,),
    "code_predictor.model.norm.weight": (PREDICTOR_WIDTH,),
    **{f"code_predictor.model.codec_embedding.{i}.weight": (2048, WIDTH) for i in range(15)},
    **{f"code_predictor.lm_head.{i}.weight": (2048, PREDICTOR_WIDTH) for i in range(15)},
}


def layer_shapes(
    width: int, inner: int, queries: int, keys: int, head_dim: int
) -> dict[str, tuple[int, ...]]:
    return {
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, queries),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    own, predictor = layer_shapes(WIDTH, 128, 64, 64, 32), layer_shapes(PREDICTOR_WIDTH, 64, 64, 32, 16)
    shapes = SHAPES | {f"model.layers.0.{name}": shape for name, shape in own.items()}
    shapes |= {f"code_predictor.model.layers.0.{name}": shape for name, shape in predictor.items()}
    made = {f"talker.{name}": torch.randn(shape) for name, shape in shapes.items()}
    return made | {"speaker_encoder.fc.weight": torch.zeros(2, 2)}


@pytest.fixture
def talker(tmp_path: Path, alone: None, weights: dict[str, torch.Tensor]) -> Iterator[Qwen3TTSTalker]:
    register_configs()
    ModelRegistry.register_model(Qwen3TTSTalker.__name__, Qwen3TTSTalker)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, tmp_path / "model.safetensors")
    config = EngineArgs(
        str(tmp_path),
        hf_overrides=talker_config,
        dtype="float32",
        enable_prompt_embeds=True,
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=32,
        max_model_len=64,
        max_num_seqs=4,
    ).create_engine_config()
    assert not config.model_config.uses_mrope
    with set_current_vllm_config(config):
        ensure_model_parallel_initialized(1, 1)
        made = Qwen3TTSTalker(vllm_config=config)
        get_model_loader(config.load_config).load_weights(made, config.model_config)
        process_weights_after_loading(made, config.model_config, torch.device("cpu"))
        yield made


@torch.no_grad()
def test_a_row_is_the_sum_of_what_a_prompt_names(
    talker: Qwen3TTSTalker, weights: dict[str, torch.Tensor]
) -> None:
    table = talker.row_table()
    vector, frames = torch.randn(WIDTH), torch.randint(2048, (2, 16), dtype=torch.int16)
    prompt = PromptRows(
        text=(7, 99, NONE, 3, 4, NONE, NONE),
        codec=(NONE, 3071, EOS, VECTOR, FRAME, FRAME, NONE),
        vector=vector.numpy().tobytes(),
        frames=frames.numpy().tobytes(),
    )
    codec = weights["talker.model.codec_embedding.weight"]
    summed = codec[frames[:, 0].long()]
    for book in range(15):
        summed = (
            summed
            + weights[f"talker.code_predictor.model.codec_embedding.{book}.weight"][
                frames[:, 1 + book].long()
            ]
        )
    expected = (
        table[7],
        table[99] + codec[3071],
        codec[EOS],
        table[3] + vector,
        table[4] + summed[0],
        summed[1],
        torch.zeros(WIDTH),
    )
    torch.testing.assert_close(talker.compose_rows(msgspec.msgpack.encode(prompt)), torch.stack(expected))


FRAMES = bytes(32)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (PromptRows((NUM_TEXT_IDS,), (0,)), "text id 100 of a prompt is not between -1 and 99"),
        (PromptRows((-2,), (0,)), "text id -2"),
        (PromptRows((2**63,), (0,)), f"text id {2**63}"),
        (PromptRows((0,), (3072,)), "codec id 3072 of a prompt is not between -3 and 3071"),
        (PromptRows((0,), (-4,)), "codec id -4"),
        (PromptRows((0, 1), (0,)), "2 text ids and 1 codec ids"),
        (PromptRows((), ()), "0 text ids"),
        (PromptRows((0,), (VECTOR,)), "0 bytes for"),
        (PromptRows((0,), (VECTOR,), vector=bytes(4)), "4 bytes for"),
        (PromptRows((0, 0), (FRAME, FRAME), frames=FRAMES), "32 bytes for"),
        (PromptRows((0,), (FRAME,), frames=b"\x00\x08" + FRAMES[2:]), "code id 2048"),
        (PromptRows((0,), (FRAME,), frames=b"\xff\xff" + FRAMES[2:]), "code id -1"),
    ],
)
def test_what_is_not_there_is_refused(talker: Qwen3TTSTalker, prompt: PromptRows, message: str) -> None:
    talker.row_table()
    with pytest.raises(ValueError, match=message):
        talker.compose_rows(msgspec.msgpack.encode(prompt))


def test_other_bytes_are_no_prompt(talker: Qwen3TTSTalker) -> None:
    with pytest.raises(ValueError, match="not the rows of a prompt"):
        talker.compose_rows(b"junk")


def test_of_the_ids_behind_the_codes_only_the_end_may_be_sampled(talker: Qwen3TTSTalker) -> None:
    logits = talker.compute_logits(torch.ones(1, WIDTH))
    assert logits is not None
    assert logits[0].isfinite().nonzero().flatten().tolist() == [*range(2048), EOS]
