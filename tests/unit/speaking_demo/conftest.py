"""The voice, and a checkpoint's folder without weights; both are made once."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from scripts.speaking_demo import checkpoint
from scripts.speaking_demo.codes import Codebook, make_codebook
from tests.checkpoints.qwen2_5_omni.tokens import TokenIds


@pytest.fixture(scope="session")
def codebook() -> Codebook:
    torch.set_num_threads(1)  # small matrices
    try:
        return make_codebook()
    except OSError as exc:
        pytest.fail(
            f"these tests need espeak-ng (on Debian: apt-get install espeak-ng): {exc}", pytrace=False
        )


@pytest.fixture(scope="session")
def layout(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TokenIds]:
    folder = tmp_path_factory.mktemp("layout")
    return folder, checkpoint.write_layout(folder)


@pytest.fixture(scope="session")
def tokenizer(layout: tuple[Path, TokenIds]) -> Tokenizer:
    return Tokenizer.from_file(str(layout[0] / "tokenizer.json"))
