"""What tests of several folders share."""

import os
import re
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

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


class _OfSeveralFamilies(LoadFileScheduling):
    """Tests with the servers of several families run in one process, or each process would start all of
    them."""

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        files = (Path(__file__).parent / "integration").glob("test_*.py")
        self._files = {
            str(file.relative_to(config.rootpath))
            for file in files
            if re.search(r"^@for_(each_|families)", file.read_text(), re.MULTILINE)
        }

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "several families" if file in self._files else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return _OfSeveralFamilies(config, log) if config.getoption("dist") == "loadfile" else None
