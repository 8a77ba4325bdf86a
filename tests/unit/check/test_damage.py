"""`omni-server serve` with a damaged checkpoint ends before anything is started, with a line that names the
file; `omni-server check` says the same."""

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_server.check.files import explained, refuse_damaged_files
from omni_server.cli.main import main
from omni_server.config.load import find_shipped_config, load_stage_config
from omni_server.config.stage_config import StageConfig
from omni_server.errors import ConfigError
from tests.checkpoints.write import make_demo_checkpoint

NESTED = "[" * 200_000
NESTED_HEADER = struct.pack("<Q", len(NESTED)) + NESTED.encode()
UNREADABLE = "model.safetensors: cannot be read as safetensors, download it again: SafetensorError: "
Damage = Callable[[Path], object]
Header = dict[str, Any]


@pytest.fixture(scope="module")
def config() -> StageConfig:
    return load_stage_config(find_shipped_config("qwen2_5_omni.demo-cpu"))


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def cut(path: Path, part: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x40
    path.write_bytes(content)


def with_header(path: Path, change: Callable[[Header], object]) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header: Header = json.loads(content[8 : 8 + length])
    change(header)
    changed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + content[8 + length :])


def with_other_type(header: Header) -> None:
    entry = header["talker.codec_head.weight"]
    entry["dtype"] = {"F32": "I32", "BF16": "I16"}[entry["dtype"]]


def without_offsets(header: Header) -> None:
    header["talker.codec_head.weight"]["data_offsets"] = []


def with_config(folder: Path, place: tuple[str, ...], value: object) -> None:
    path = folder / "config.json"
    config = inner = json.loads(path.read_text())
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(config))


def with_index(folder: Path, file: str) -> None:
    index = {"metadata": {}, "weight_map": {"talker.codec_head.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def outside(folder: Path) -> None:
    shutil.copy(weights(folder), folder.parent / "model.safetensors")
    with_index(folder, "../model.safetensors")


class Attack:
    """What a pickle may do where it is trusted."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Callable[[Path], object], tuple[Path]]:
        return Path.touch, (self._trace,)


DAMAGE: dict[str, tuple[Damage, str]] = {
    "cut off": (lambda folder: cut(weights(folder), 0.6), UNREADABLE),
    "cut off in its header": (lambda folder: cut(weights(folder), 1e-5), UNREADABLE),
    "empty": (lambda folder: cut(weights(folder), 0), UNREADABLE),
    "a byte too many": (
        lambda folder: weights(folder).write_bytes(weights(folder).read_bytes() + b"\0"),
        UNREADABLE,
    ),
    "a page of HTML": (
        lambda folder: weights(folder).write_bytes(b"<html>Too many requests</html>"),
        UNREADABLE,
    ),
    "a pointer of Git LFS": (
        lambda folder: weights(folder).write_bytes(
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
        ),
        "is a pointer of Git LFS",
    ),
    "length of the header": (lambda folder: flip(weights(folder), 5), UNREADABLE),
    "header": (
        lambda folder: flip(weights(folder), 40),
        UNREADABLE,
    ),
    "type of a weight": (
        lambda folder: with_header(weights(folder), with_other_type),
        "the weight talker.codec_head.weight is of type I",
    ),
    "missing shard": (
        lambda folder: with_index(folder, "model-00002.safetensors"),
        "model-00002.safetensors",
    ),
    "index without a map": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
        "no weight_map: download it again",
    ),
    "index of nothing": (
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}'),
        "has no weights in the format safetensors",
    ),
    "index that leads outside": (outside, "model.safetensors.index.json names files outside of its folder"),
    "index": (lambda folder: with_index(folder, 7), "are missing"),  # type: ignore[arg-type]
    "config.json": (lambda folder: cut(folder / "config.json", 0.5), "config.json: cannot be read as JSON"),
    "nested config.json": (
        lambda folder: (folder / "config.json").write_text(NESTED),
        "config.json: cannot be read as JSON: RecursionError",
    ),
    "nested tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text(NESTED),
        "tokenizer.json: cannot be read as JSON: RecursionError",
    ),
    "values of another type": (
        lambda folder: with_config(folder, ("talker_config", "embedding_size"), [1]),
        "config.json describes no model that can be built",
    ),
    "preprocessor": (
        lambda folder: cut(folder / "preprocessor_config.json", 0.5),
        "preprocessor_config.json: cannot be read as JSON",
    ),
    "tokenizer": (
        lambda folder: cut(folder / "tokenizer.json", 0.5),
        "tokenizer.json: cannot be read as JSON",
    ),
    "another tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text('{"version": "1.0"}'),
        "cannot open it",
    ),
    "no preprocessor": (
        lambda folder: (folder / "preprocessor_config.json").unlink(),
        "preprocessor_config.json",
    ),
    "nested header": (
        lambda folder: weights(folder).write_bytes(NESTED_HEADER),
        UNREADABLE,
    ),
    "no offsets": (
        lambda folder: with_header(weights(folder), without_offsets),
        UNREADABLE,
    ),
    "voices": (lambda folder: cut(folder / "spk_dict.pt", 0.1), "spk_dict.pt cannot be read as tensors"),
    "voices of another type": (
        lambda folder: torch.save(
            {"Chelsie": dict.fromkeys(("bos_token", "cond", "ref_mel"), 1)}, folder / "spk_dict.pt"
        ),
        "spk_dict.pt: 'cond' of voice 'Chelsie' must have 2 dimensions",
    ),
    "voices with code in them": (
        lambda folder: (folder / "spk_dict.pt").write_bytes(
            pickle.dumps({"Chelsie": Attack(folder / "trace")})
        ),
        "spk_dict.pt cannot be read as tensors",
    ),
}


@pytest.mark.parametrize("command", ["serve", "check"])
@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_file_is_named(
    command: str, name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = DAMAGE[name]
    damage(folder)

    told = outcome(command, folder, "qwen2_5_omni.demo-cpu", capsys)
    assert message in told
    assert "weights_only" not in told, "torch's advice to trust the file"
    if command == "serve":
        assert str(folder) in told
    assert not (folder / "trace").exists(), "code of the checkpoint was run"


def outcome(command: str, folder: Path, config: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that fails says; of `serve` the last line, which is all of the error."""
    port = ["--port", "0"] if command == "serve" else []
    assert main([command, str(folder), "--stage-config", config, *port]) == 2
    output = capsys.readouterr()
    if command == "check":
        return " ".join((output.out + output.err).split())
    last = output.err.strip().splitlines()[-1]
    assert last.startswith("omni-server: error: ")
    return last


@pytest.fixture(scope="module")
def whole_of_families(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    pipelines = {"diffusers": "qwen-image", "qwen3_tts": "base"}
    in_folders = {
        family: make_demo_checkpoint(root / family, family=family, pipeline=pipeline)
        for family, pipeline in pipelines.items()
    }
    return {"qwen2_5_omni": whole, **in_folders}


def with_component(folder: Path, name: str, value: object) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))


PIPELINE_DAMAGE: dict[str, tuple[Damage, str]] = {
    "a broken header": (
        lambda folder: flip(next(folder.glob("transformer/*.safetensors")), 40),
        "transformer/diffusion_pytorch_model.safetensors: cannot be read as safetensors",
    ),
    "a nested index": (
        lambda folder: (folder / "model_index.json").write_text(NESTED),
        "model_index.json: cannot be read as JSON",
    ),
    "a nested config": (
        lambda folder: (folder / "scheduler" / "scheduler_config.json").write_text(NESTED),
        "scheduler/scheduler_config.json: cannot be read as JSON",
    ),
    "a nested tokenizer": (
        lambda folder: (folder / "tokenizer" / "tokenizer.json").write_text(NESTED),
        "tokenizer/tokenizer.json: cannot be read as JSON",
    ),
    "a function for a class": (
        lambda folder: with_component(folder, "scheduler", ["transformers", "pipeline"]),
        "model_index.json: scheduler is pipeline of transformers, which is no class",
    ),
    "a class that is not there": (
        lambda folder: with_component(folder, "scheduler", ["diffusers", "NoScheduler"]),
        "model_index.json: scheduler is NoScheduler of diffusers, which is no class",
    ),
    "a list for a library": (
        lambda folder: with_component(folder, "scheduler", [["diffusers"], "PNDMScheduler"]),
        "not a library and a class",
    ),
}


CODEC = "speech_tokenizer"
CODEC_DAMAGE: dict[str, tuple[Damage, str]] = {
    "cut off": (lambda folder: cut(weights(folder / CODEC), 0.6), f"{CODEC}/{UNREADABLE}"),
    "no weights": (
        lambda folder: weights(folder / CODEC).unlink(),
        f"{CODEC} has no weights in the format safetensors",
    ),
    "missing shard": (
        lambda folder: with_index(folder / CODEC, "model-00002.safetensors"),
        f"{CODEC}: 1 of the 1 weight files that model.safetensors.index.json names are missing",
    ),
    "a nested config": (
        lambda folder: (folder / CODEC / "config.json").write_text(NESTED),
        f"{CODEC}/config.json: cannot be read as JSON",
    ),
}
IN_FOLDERS = {"diffusers": PIPELINE_DAMAGE, "qwen3_tts": CODEC_DAMAGE}


@pytest.mark.parametrize("command", ["serve", "check"])
@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family, damages in IN_FOLDERS.items() for name in damages]
)
def test_damaged_file_in_a_folder_of_a_checkpoint_is_named(
    command: str,
    family: str,
    name: str,
    whole_of_families: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(shutil.copytree(whole_of_families[family], tmp_path / family))
    damage, message = IN_FOLDERS[family][name]
    damage(folder)

    assert message in outcome(command, folder, f"{family}.demo-cpu", capsys)


def test_whole_files_are_not_refused(folder: Path, config: StageConfig) -> None:
    refuse_damaged_files(folder, config, load_format="auto")
    shutil.copytree(folder, folder.parent / "without")
    weights(folder.parent / "without").unlink()
    refuse_damaged_files(folder.parent / "without", config, load_format="dummy")


@pytest.mark.parametrize(
    ("family", "part", "name"),
    [
        ("qwen2_5_omni", "", "talker.codec_head.weight"),
        ("qwen3_tts", CODEC, "decoder.pre_conv.conv.weight"),
        ("qwen3_tts", CODEC, "encoder.encoder.layers.0.conv.weight"),
    ],
)
def test_start_that_failed_is_explained_by_weights_that_are_missing_or_misshapen(
    family: str, part: str, name: str, whole_of_families: dict[str, Path], tmp_path: Path
) -> None:
    """Which no header tells by itself."""
    folder = Path(shutil.copytree(whole_of_families[family], tmp_path / family))
    config = load_stage_config(find_shipped_config(f"{family}.demo-cpu"))
    failed = ConfigError("a stage did not start: Engine core initialization failed.")
    assert explained(failed, folder, config, load_format="auto") is failed

    def renamed(header: Header) -> None:
        header["another"] = header.pop(name)

    def turned(header: Header) -> None:
        header[name]["shape"].reverse()

    whole_name = f"{part}/{name}" if part else name
    for change, message in ((turned, "is ["), (renamed, f"in no file, the first is {whole_name}")):
        with_header(weights(folder / part), change)
        refuse_damaged_files(folder, config, load_format="auto")
        told = str(explained(failed, folder, config, load_format="auto"))
        assert message in told
        assert whole_name in told
        assert told.endswith(f"({failed})")
