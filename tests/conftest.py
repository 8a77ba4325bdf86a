"""What tests of several folders share."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def answer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where references keep their answers: one folder for all processes of this test run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # each process has its own folder in the run's
    folder /= "answers"
    folder.mkdir(exist_ok=True)
    return folder
