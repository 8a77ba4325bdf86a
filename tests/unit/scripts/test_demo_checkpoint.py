import json
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoTokenizer,
    Qwen2_5OmniForConditionalGeneration,
)

from omni_server.config.model_folder import read_about
from omni_server.errors import ConfigError
from omni_server.types import AboutModel
from tests.checkpoints.qwen2_5_omni.sizes import SIZES
from tests.checkpoints.write import make_demo_checkpoint

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "make_demo_checkpoint"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_checkpoint(
        tmp_path_factory.mktemp("full") / "checkpoint", size="tiny", vocabulary="full", dtype="bfloat16"
    )


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sizes of the 7B, no weights."""
    return make_demo_checkpoint(tmp_path_factory.mktemp("genuine") / "checkpoint", size="7b", weights="dummy")


def _json(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def test_files_are_those_of_the_published_checkpoints(tiny: Path) -> None:
    assert {file.name for file in tiny.iterdir()} - {"about.json"} == {
        "added_tokens.json",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors",
        "preprocessor_config.json",
        "special_tokens_map.json",
        "spk_dict.pt",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    }
    assert read_about(tiny) == AboutModel(
        notice="The weights of this model are random: it generates nonsense and noise."
    )
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in tiny.iterdir())


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(
    tiny: Path, tmp_path: Path
) -> None:
    again = make_demo_checkpoint(tmp_path / "again")
    other = make_demo_checkpoint(tmp_path / "other", seed=1)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (tiny / name).read_bytes()
    assert (other / "config.json").read_bytes() == (tiny / "config.json").read_bytes()
    with safe_open(tiny / "model.safetensors", "pt") as a, safe_open(other / "model.safetensors", "pt") as b:
        same = [name for name in a.keys() if torch.equal(a.get_tensor(name), b.get_tensor(name))]  # noqa: SIM118
    assert same == []
    voices_a, voices_b = (torch.load(folder / "spk_dict.pt", weights_only=True) for folder in (tiny, other))
    assert not torch.equal(voices_a["Chelsie"]["cond"], voices_b["Chelsie"]["cond"])


@pytest.mark.parametrize("name", ["tiny", "full", "genuine"])
def test_ids_of_the_config_are_those_of_the_tokenizer(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    config, tokenizer = _json(folder, "config.json"), AutoTokenizer.from_pretrained(folder)
    thinker, talker = config["thinker_config"], config["talker_config"]
    tokens = {
        "audio_token_index": "<|AUDIO|>",
        "image_token_index": "<|IMAGE|>",
        "video_token_index": "<|VIDEO|>",
        "audio_start_token_id": "<|audio_bos|>",
        "audio_end_token_id": "<|audio_eos|>",
        "vision_start_token_id": "<|vision_bos|>",
        "vision_end_token_id": "<|vision_eos|>",
    }
    for key, token in tokens.items():
        assert thinker[key] == talker[key] == tokenizer.convert_tokens_to_ids(token)
        assert tokenizer.encode(token) == [thinker[key]]
    for role in ("system", "user", "assistant"):
        assert len(tokenizer.encode(f"<|im_start|>{role}\n")) == 3
    assert tokenizer.encode("user") == [thinker["user_token_id"]]
    generation = _json(folder, "generation_config.json")
    assert thinker["eos_token_id"] == tokenizer.eos_token_id
    assert generation["eos_token_id"] == [tokenizer.eos_token_id, tokenizer.pad_token_id]

    speech = [talker[f"tts_text_{part}_token_id"] for part in ("start", "end", "pad")]
    speech += [voice["bos_token"] for voice in torch.load(folder / "spk_dict.pt", weights_only=True).values()]
    assert len(set(speech)) == 5
    # no text is ever tokenised to an id of the speech part, and the embedding has a row for it
    assert all(len(tokenizer) <= token < thinker["text_config"]["vocab_size"] for token in speech)


@pytest.mark.parametrize("name", ["full", "genuine"])
def test_the_full_vocabulary_has_the_genuine_ids(name: str, request: pytest.FixtureRequest) -> None:
    full: Path = request.getfixturevalue(name)
    config, tokenizer = _json(full, "config.json"), AutoTokenizer.from_pretrained(full)
    thinker, talker = config["thinker_config"], config["talker_config"]
    assert thinker["text_config"]["vocab_size"] == 152064
    assert (thinker["audio_token_index"], thinker["image_token_index"], thinker["video_token_index"]) == (
        151646,
        151655,
        151656,
    )
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>") == [151644, 872, 198, 151645]
    assert [talker[f"tts_text_{part}_token_id"] for part in ("pad", "start", "end")] == [
        151859,
        151860,
        151861,
    ]
    voices = torch.load(full / "spk_dict.pt", weights_only=True)
    assert {name: voice["bos_token"] for name, voice in voices.items()} == {
        "Chelsie": 151872,
        "Ethan": 151870,
    }


def test_the_genuine_size_has_the_parameters_of_the_7b(genuine: Path) -> None:
    with torch.device("meta"):
        model = Qwen2_5OmniForConditionalGeneration(AutoConfig.from_pretrained(genuine))
    assert model.num_parameters() == 10_732_225_408
    assert model.config.dtype == torch.bfloat16


def test_the_size_3b_has_the_parameters_of_the_3b(tmp_path: Path) -> None:
    folder = make_demo_checkpoint(tmp_path / "checkpoint", size="3b", weights="dummy")
    with torch.device("meta"):
        model = Qwen2_5OmniForConditionalGeneration(AutoConfig.from_pretrained(folder))
    assert model.num_parameters() == 5_537_120_640
    assert sum(weight.numel() for weight in model.talker.parameters()) == 384_604_928


def test_the_genuine_size_has_voices_and_limits_of_the_7b(genuine: Path) -> None:
    voices = torch.load(genuine / "spk_dict.pt", weights_only=True)
    shapes = {
        name: (tuple(voice["cond"].shape), tuple(voice["ref_mel"].shape)) for name, voice in voices.items()
    }
    assert shapes == dict.fromkeys(("Chelsie", "Ethan"), ((1, 192), (1, 400, 80)))
    preprocessor = _json(genuine, "preprocessor_config.json")
    assert (preprocessor["max_pixels"], preprocessor["n_samples"]) == (12_845_056, 300 * 16_000)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weights": "random"}, "21 GB"),
        ({"weights": "dummy", "vocabulary": "small"}, "full vocabulary"),
        ({"weights": "dummy", "dtype": "float32"}, "bfloat16"),
    ],
)
def test_what_the_genuine_size_cannot_be_is_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_demo_checkpoint(tmp_path / "checkpoint", size="7b", **changes)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_size_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'huge'.*tiny, wide, 7b, 3b"):
        make_demo_checkpoint(tmp_path / "checkpoint", size="huge")
    assert list(tmp_path.iterdir()) == []


def test_sections_that_do_not_fill_half_a_head_are_refused() -> None:
    with pytest.raises(ConfigError, match="mrope_section"):
        replace(SIZES["tiny"], talker=replace(SIZES["tiny"].talker, mrope_section=(4, 4, 4)))


def test_a_folder_with_content_is_kept_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "precious").write_text("mine")
    with pytest.raises(ConfigError, match="remove it first"):
        make_demo_checkpoint(tmp_path / "checkpoint")
    assert [file.name for file in tmp_path.rglob("*")] == ["checkpoint", "precious"]


def test_the_script_writes_one_line(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "checkpoint"), "--seed", "5"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert made.stdout.count("\n") == 1
    assert "MB" in made.stdout
    assert "million parameters" in made.stdout
    assert (tmp_path / "checkpoint" / "model.safetensors").is_file()


def test_the_script_says_how_a_folder_without_weights_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "checkpoint"
    monkeypatch.setattr(sys, "argv", ["make_demo_checkpoint", str(out), "--size", "7b", "--weights", "dummy"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    runpy.run_path(str(SCRIPT), run_name="__main__")
    written = capsys.readouterr().out
    assert "10732.23 million parameters" in written
    assert written.endswith(f"omni-server serve {out} --load-format dummy\n")


def test_the_script_explains_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "precious").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["make_demo_checkpoint", str(tmp_path)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit, match="remove it first"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
