"""What tests of several folders share."""

import os
from pathlib import Path

import pytest

from tests.omni_families import FAMILIES, QWEN2_5_OMNI


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--family",
        choices=tuple(FAMILIES),
        default=QWEN2_5_OMNI.name,
        help="model family of servers in tests that run with one family (default: %(default)s)",
    )


@pytest.fixture(scope="session")
def answer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where references keep their answers: one folder for all processes of this test run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # each process has its own folder in the run's
    folder /= "answers"
    folder.mkdir(exist_ok=True)
    return folder
