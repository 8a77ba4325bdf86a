"""Reading spk_dict.pt."""

from pathlib import Path
from typing import Any

import pytest
import torch

from omni_server.errors import ConfigError
from stages.qwen2_5_omni.code2wav.voices import load_voices

VOICE = {"bos_token": 7, "cond": torch.ones(1, 24, dtype=torch.bfloat16), "ref_mel": torch.zeros(1, 60, 80)}


def write(folder: Path, content: Any) -> Path:
    torch.save(content, folder / "spk_dict.pt")
    return folder


def test_gives_the_voices_in_the_files_order(tmp_path: Path) -> None:
    voices = load_voices(write(tmp_path, {"Ethan": VOICE, "Chelsie": VOICE}))
    assert list(voices) == ["Ethan", "Chelsie"]
    assert voices["Ethan"].bos_token == 7
    assert voices["Ethan"].conditioning.dtype == torch.float32
    assert voices["Ethan"].conditioning.shape == (1, 24)
    assert voices["Ethan"].reference_mel.shape == (1, 60, 80)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no spk_dict\.pt"):
        load_voices(tmp_path)


class Code:
    """Pickled, this is an instruction to import and call."""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "holds no voices"),
        ([VOICE], "holds no voices"),
        ({"Ethan": 3}, "voice 'Ethan' is int, not a mapping"),
        ({"Ethan": {"bos_token": 7}}, "voice 'Ethan' lacks cond, ref_mel"),
        (
            {"Ethan": {**VOICE, "cond": torch.ones(24)}},
            r"'cond' of voice 'Ethan' must have 2 dimensions, .*\[24\]",
        ),
        ({"Ethan": {**VOICE, "cond": [1.0]}}, "'cond' of voice 'Ethan' .*list"),
        (
            {"Ethan": {**VOICE, "ref_mel": torch.ones(2, 60, 80)}},
            r"'ref_mel' of voice 'Ethan' .*\[2, 60, 80\]",
        ),
        ({"Ethan": {**VOICE, "bos_token": Code()}}, "cannot be read as tensors"),
    ],
)
def test_a_wrong_content_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_voices(write(tmp_path, content))


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spk_dict.pt").write_bytes(b"not a pickle")
    with pytest.raises(ConfigError, match="cannot be read as tensors"):
        load_voices(tmp_path)
