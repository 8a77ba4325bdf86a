from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def media_folder() -> Path:
    return Path(__file__).parents[2] / "data" / "media"
