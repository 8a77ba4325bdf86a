"""`omni-server check` of folders with something wrong: which file, and what is wrong with it."""

import json
import re
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from omni_server.check import run
from tests.unit.check.findings import CPU, Check, errors, the_error


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


def hub_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """As the hub client leaves it when only the small files have been asked for."""
    (folder / "model.safetensors").unlink()
    index = {
        "metadata": {"total_size": size},
        "weight_map": {"thinker.lm_head.weight": "model-1.safetensors"},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(run, "find_folder", lambda *_, **options: folder)


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
