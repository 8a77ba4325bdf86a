from pathlib import Path

import pytest

from tests.checkpoints.write import make_demo_checkpoint
from tests.reference.cases import CASES
from tests.reference.reference import Reference, ReferenceResult

CHECKPOINTS = {"tiny seed 0": ("tiny", 0), "tiny seed 1": ("tiny", 1), "wide": ("wide", 0)}
"""The three that engines are compared on."""


@pytest.fixture(scope="session", params=list(CHECKPOINTS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    size, seed = CHECKPOINTS[request.param]
    return make_demo_checkpoint(tmp_path_factory.mktemp("demo") / "checkpoint", size=size, seed=seed)


@pytest.fixture(scope="session")
def reference(checkpoint: Path, answer_folder: Path) -> Reference:
    return Reference(checkpoint, answer_folder)


@pytest.fixture(scope="session")
def results(reference: Reference) -> dict[str, ReferenceResult]:
    """Answers to all cases, by name."""
    return reference.answers_of(CASES)
