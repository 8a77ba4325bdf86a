"""Folders of models, whole or to be damaged, and `omni-server check` on a machine with enough of
everything."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from omni_server.check import run
from omni_server.check.report import DeviceMemory
from omni_server.cli.main import main
from omni_server.family import FamilyModel
from stages.qwen2_5_omni import FAMILY
from tests.checkpoints.write import make_demo_checkpoint
from tests.unit.check.findings import GB, Check


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint."""
    return make_demo_checkpoint(tmp_path_factory.mktemp("whole") / "demo")


@pytest.fixture(scope="session")
def made_7b(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FamilyModel]:
    """The sizes of the 7B, without weights; opened once, because its vocabulary takes seconds."""
    folder = make_demo_checkpoint(tmp_path_factory.mktemp("7b") / "7b", size="7b", weights="dummy")
    return folder, FAMILY.open(folder)


@pytest.fixture
def seven_b(made_7b: tuple[Path, FamilyModel], monkeypatch: pytest.MonkeyPatch) -> Path:
    folder, model = made_7b
    monkeypatch.setattr(type(FAMILY), "open", lambda self, model_dir: {folder: model}[model_dir])
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "demo"))


@pytest.fixture
def shards(folder: Path) -> Path:
    """The weights in two files with an index, as large models have them."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-0000{1 + name.startswith('talker.')}-of-00002.safetensors" for name in weights}
    for file in set(names.values()):
        save_file({name: weights[name] for name in weights if names[name] == file}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Check:
    """The exit code and the JSON, on a machine with enough of everything."""
    monkeypatch.setattr(run, "memory_of_this_machine", lambda: DeviceMemory(None, "memory", 16 * GB, 12 * GB))
    monkeypatch.setattr(run, "shared_memory_free", lambda: GB)

    def run_check(*words: str | Path) -> tuple[int, dict[str, Any]]:
        code = main(["check", *map(str, words), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run_check
