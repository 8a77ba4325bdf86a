"""Qwen3-Omni's demo checkpoint has the published layout, and is what the tests of the engines need."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, Qwen3OmniMoeForConditionalGeneration

from omni_server.errors import ConfigError
from tests.checkpoints.qwen3_omni.sizes import SIZES
from tests.checkpoints.write import make_demo_checkpoint

FAMILY = "qwen3_omni"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint", family=FAMILY)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full") / "checkpoint"
    return make_demo_checkpoint(folder, family=FAMILY, vocabulary="full", dtype="bfloat16")


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("genuine") / "checkpoint"
    return make_demo_checkpoint(folder, family=FAMILY, size="30b", weights="dummy")


def _json(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def _shapes(folder: Path) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", "pt") as weights:
        return {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118


def test_files_are_those_of_the_published_checkpoint(tiny: Path) -> None:
    assert {file.name for file in tiny.iterdir()} - {"about.json"} == {
        "added_tokens.json",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors",
        "preprocessor_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    }


def test_experts_are_stored_one_by_one(tiny: Path) -> None:
    shapes, size = _shapes(tiny), SIZES["tiny"]
    assert not any("gate_up_proj" in name for name in shapes)
    for part, text in (("thinker", size.thinker), ("talker", size.talker)):
        experts = f"{part}.model.layers.0.mlp.experts."
        assert {name.removeprefix(experts).split(".")[0] for name in shapes if name.startswith(experts)} == {
            str(i) for i in range(text.experts.experts)
        }
        assert shapes[f"{experts}1.down_proj.weight"] == [text.hidden, text.experts.intermediate]
        assert shapes[f"{experts}1.gate_proj.weight"] == [text.experts.intermediate, text.hidden]
    assert "talker.code_predictor.model.codec_embedding.14.weight" in shapes
    assert "talker.code_predictor.lm_head.14.weight" in shapes


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(
    tiny: Path, tmp_path: Path
) -> None:
    again = make_demo_checkpoint(tmp_path / "again", family=FAMILY)
    other = make_demo_checkpoint(tmp_path / "other", family=FAMILY, seed=1)
    for file in tiny.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()
    with safe_open(tiny / "model.safetensors", "pt") as a, safe_open(other / "model.safetensors", "pt") as b:
        names = list(a.keys())
        same = {name for name in names if torch.equal(a.get_tensor(name), b.get_tensor(name))}
    assert same == {"code2wav.decoder.6.conv.bias"}  # 0: no direct current


@pytest.mark.parametrize("name", ["tiny", "full", "genuine"])
def test_ids_of_the_config_are_those_of_the_tokenizer(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    config, tokenizer = _json(folder, "config.json"), AutoTokenizer.from_pretrained(folder)
    thinker, talker = config["thinker_config"], config["talker_config"]
    media = {
        "audio_token_id": "<|audio_pad|>",
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "audio_start_token_id": "<|audio_start|>",
        "audio_end_token_id": "<|audio_end|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    for key, token in media.items():
        assert thinker[key] == talker[key]
        assert tokenizer.encode(token) == [thinker[key]]
    others = {
        "im_start_token_id": "<|im_start|>",
        "im_end_token_id": "<|im_end|>",
        "system_token_id": "system",
        "user_token_id": "user",
        "assistant_token_id": "assistant",
        "tts_pad_token_id": "<tts_pad>",
        "tts_bos_token_id": "<tts_text_bos>",
        "tts_eos_token_id": "<tts_text_eod>",
    }
    for key, token in others.items():
        assert tokenizer.encode(token) == [config[key]]
    assert config["im_end_token_id"] == tokenizer.eos_token_id
    assert len(tokenizer) <= thinker["text_config"]["vocab_size"]


@pytest.mark.parametrize("name", ["full", "genuine"])
def test_the_full_vocabulary_has_the_genuine_ids(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    config, tokenizer = _json(folder, "config.json"), AutoTokenizer.from_pretrained(folder)
    assert config["thinker_config"]["text_config"]["vocab_size"] == 152064
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>") == [151644, 872, 198, 151645]
    keys = ("tts_pad_token_id", "tts_bos_token_id", "tts_eos_token_id")
    assert [config[key] for key in keys] == [151671, 151672, 151673]
    assert config["thinker_config"]["audio_token_id"] == 151675


def test_what_the_talker_takes_from_the_thinker_lies_behind_the_layers_that_vision_is_added_to() -> None:
    with pytest.raises(ConfigError, match="accept_hidden_layer 2"):
        replace(SIZES["tiny"], accept_hidden_layer=2)
    with pytest.raises(ConfigError, match="accept_hidden_layer 5"):
        replace(SIZES["tiny"], accept_hidden_layer=5)


def test_the_genuine_size_has_the_parameters_of_the_published_model(genuine: Path) -> None:
    with torch.device("meta"):
        model = Qwen3OmniMoeForConditionalGeneration(AutoConfig.from_pretrained(genuine))
    assert not (genuine / "model.safetensors").exists()
    assert model.num_parameters() == 35_259_818_545
    assert sum(weight.numel() for weight in model.talker.parameters()) == 3_324_596_480
    assert sum(weight.numel() for weight in model.code2wav.parameters()) == 216_016_577
    assert model.config.dtype == torch.bfloat16


def test_an_unknown_family_and_size_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'qwen4'.*qwen2_5_omni, qwen3_omni"):
        make_demo_checkpoint(tmp_path / "checkpoint", family="qwen4")
    with pytest.raises(ConfigError, match=r"'7b'.*tiny, wide, 30b"):
        make_demo_checkpoint(tmp_path / "checkpoint", family=FAMILY, size="7b")
    with pytest.raises(ConfigError, match="71 GB"):
        make_demo_checkpoint(tmp_path / "checkpoint", family=FAMILY, size="30b")
    assert list(tmp_path.iterdir()) == []
