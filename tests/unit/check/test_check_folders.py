"""`omni-server check` of folders with something wrong: which file, and what is wrong with it."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from omni_server.check import run
from tests.unit.check.findings import CPU, Check, errors, the_error

UNREADABLE = (
    "cannot be read as safetensors, download it again: SafetensorError: Error while deserializing header: "
)


def test_a_folder_without_weights_is_told_of_dummy_ones(check: Check, seven_b: Path) -> None:
    assert "serve random ones with --load-format dummy" in the_error(check(seven_b, "--device-memory", "80G"))


def test_a_missing_shard_is_named(check: Check, shards: Path) -> None:
    (shards / "model-00002-of-00002.safetensors").unlink()

    assert the_error(check(shards, *CPU)) == (
        f"files: {shards}: 1 of the 2 weight files that model.safetensors.index.json names are missing "
        "(model-00002-of-00002.safetensors): download the model again"
    )


def test_a_weight_that_is_not_where_the_index_says_is_named(check: Check, shards: Path) -> None:
    file = shards / "model-00002-of-00002.safetensors"
    weights = load_file(file)
    del weights["talker.codec_head.weight"]
    save_file(weights, file)

    assert f"{file} lacks the weight talker.codec_head.weight" in the_error(check(shards, *CPU))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-1000], f"{UNREADABLE}incomplete metadata, file not fully covered"),
        (lambda content: content + b"\0", f"{UNREADABLE}incomplete metadata, file not fully covered"),
        (lambda content: content[:100], f"{UNREADABLE}invalid header length"),
        (lambda content: b"", f"{UNREADABLE}header too small"),
        (
            lambda content: b"<html>Too many requests, come back later</html>",
            f"{UNREADABLE}header too large",
        ),
        (
            lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "is a pointer of Git LFS",
        ),
        (lambda content: struct.pack("<Q", 2) + b"[]", f"{UNREADABLE}invalid JSON in header"),
        (
            lambda content: content.replace(b'"F32"', b'"F64"', 1),
            f"{UNREADABLE}invalid shape, data type, or offset for tensor",
        ),
    ],
)
def test_a_damaged_file_of_weights_is_named_with_what_is_wrong(
    check: Check, folder: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))

    error = the_error(check(folder, *CPU))
    assert error.startswith(f"files: {file}: ")
    assert message in error


def test_weights_that_no_file_has_are_told_with_their_stage(check: Check, folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file({name: w for name, w in load_file(file).items() if not name.startswith("talker.")}, file)

    error = the_error(check(folder, *CPU))
    assert re.match(
        r"files: stage 'talker': (\d+) of its \1 weights are in no file, the first is talker\.", error
    )


def test_weights_of_another_size_than_the_config_says_are_told(check: Check, folder: Path) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["thinker_config"]["text_config"]["intermediate_size"] *= 2
    file.write_text(json.dumps(config))

    error = the_error(check(folder, *CPU))
    assert error.startswith("files: stage 'thinker': the weight thinker.model.layers.0.mlp.")
    assert error.endswith("they are of different models")


def test_tied_embeddings_are_needed_once(check: Check, folder: Path) -> None:
    _, before = check(folder, *CPU)
    weights = load_file(folder / "model.safetensors")
    head = weights.pop("thinker.lm_head.weight")
    save_file(weights, folder / "model.safetensors")
    assert "thinker.lm_head.weight" in the_error(check(folder, *CPU))

    config = json.loads((folder / "config.json").read_text())
    config["thinker_config"]["text_config"]["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    code, report = check(folder, *CPU)
    assert code == 0
    assert report["stages"][0]["weights"] == before["stages"][0]["weights"] - 4 * head.size


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["spk_dict.pt"], "lacks the voices: spk_dict.pt"),
        (["preprocessor_config.json"], "lacks how sound and pictures are prepared: preprocessor_config.json"),
        (["tokenizer_config.json"], "lacks the tokenizer's settings: tokenizer_config.json"),
        (["vocab.json", "tokenizer.json"], "lacks the tokenizer: tokenizer.json or vocab.json"),
    ],
)
def test_a_missing_small_file_is_named_with_its_purpose(
    check: Check, folder: Path, names: list[str], message: str
) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)

    code, report = check(folder, *CPU)
    assert code == 2
    assert any(message in error for error in errors(report))


def test_a_damaged_small_file_is_named(check: Check, folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text("{")

    code, report = check(folder, *CPU)
    assert code == 2
    assert any("preprocessor_config.json: cannot be read as JSON" in error for error in errors(report))


def test_a_file_of_voices_that_is_none_is_told(check: Check, folder: Path) -> None:
    (folder / "spk_dict.pt").write_bytes(b"no tensors")

    assert f"{folder / 'spk_dict.pt'} cannot be read as tensors" in the_error(check(folder, *CPU))


def test_another_kind_of_model_is_told(check: Check, folder: Path) -> None:
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]})
    )

    told = the_error(check(folder, *CPU))
    assert (
        "is not a checkpoint that this server can run: its config.json (model_type: qwen3) names Qwen3F"
        in told
    )


def test_an_omni_model_of_another_family_is_told(check: Check, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen3OmniMoeForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(config))

    error = the_error(check(folder, *CPU))
    assert "names Qwen3OmniMoeForConditionalGeneration, and the server runs Qwen2_5OmniModel" in error


def test_a_config_that_describes_no_model_is_told(check: Check, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["thinker_config"]["text_config"]["num_attention_heads"] = "four"
    (folder / "config.json").write_text(json.dumps(config))

    code, report = check(folder, *CPU)
    assert code == 2
    assert any("describes no model that can be built" in error for error in errors(report))


def hub_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """As the hub client leaves it when only the small files have been asked for."""
    (folder / "model.safetensors").unlink()
    index = {
        "metadata": {"total_size": size},
        "weight_map": {"thinker.lm_head.weight": "model-1.safetensors"},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(run, "resolve_model_folder", lambda model, **options: folder)


def test_a_model_of_the_hub_needs_no_weights_yet(
    check: Check, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_folder(folder, monkeypatch, 13_000_000)

    code, report = check("some/model", *CPU)
    assert code == 0
    assert [item["message"] for item in report["findings"]] == [
        "the weights of some/model are not here yet: 'omni-server serve' downloads 0.0 GB"
    ]


def test_weights_that_the_disk_has_no_room_for_are_told(
    check: Check, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_folder(folder, monkeypatch, 10**18)

    assert "take 1000000000.0 GB" in the_error(check("some/model", *CPU))


def test_a_checkpoint_without_a_voice_is_told(check: Check, folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"enable_audio_output": False}))

    assert the_error(check(folder, *CPU)) == (
        "files: the checkpoint has no talker (enable_audio_output in config.json): use a stage config with the thinker "
        "alone"
    )


def test_no_folder_is_told(check: Check, tmp_path: Path) -> None:
    assert "no such folder, and not a hub id either" in the_error(check(tmp_path / "none", *CPU))
