from pathlib import Path

import pytest

from tests.checkpoints.write import make_demo_checkpoint
from tests.reference.cases import CASES
from tests.reference.reference import Reference, ReferenceResult


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_checkpoint(tmp_path_factory.mktemp("demo") / "checkpoint")


@pytest.fixture(scope="session")
def reference(checkpoint: Path, answer_folder: Path) -> Reference:
    return Reference(checkpoint, answer_folder)


@pytest.fixture(scope="session")
def results(reference: Reference) -> dict[str, ReferenceResult]:
    """Answers to all cases, by name."""
    return reference.answers_of(CASES)
