"""docs/configuration.md and README.md keep up with the code."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from omni_server.config.load import shipped_configs
from omni_server.config.stage_config import (
    ArStage,
    ChunkPlan,
    DiffusionStage,
    Edge,
    PacingConfig,
    QueueConfig,
    SamplingDefaults,
    SolverConfig,
    StageConfig,
)

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "configuration.md").read_text()


@pytest.mark.parametrize(
    "model",
    [StageConfig, ArStage, DiffusionStage, SamplingDefaults, SolverConfig, Edge, QueueConfig, ChunkPlan, PacingConfig],
)
def test_every_field_is_documented(model: type[BaseModel]) -> None:
    documented = set(re.findall(r"`(\w+)`", PAGE))

    assert {field.alias or name for name, field in model.model_fields.items()} <= documented


@pytest.mark.parametrize(
    "model",
    [StageConfig, ArStage, SolverConfig, QueueConfig, ChunkPlan, PacingConfig],
    ids=lambda model: model.__name__,
)
def test_documented_defaults_are_the_real_ones(model: type[BaseModel]) -> None:
    documented = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]+?)`? \|", PAGE, flags=re.MULTILINE))
    defaults = {name: field.default for name, field in model.model_fields.items()}
    plain = {name: default for name, default in defaults.items() if isinstance(default, float | int | str)}

    assert plain
    for name, default in plain.items():
        assert type(default)(documented[name]) == default, name


def test_every_shipped_config_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()

    assert all(f"| `{name}` |" in readme for name in shipped_configs())


def test_links_between_the_documents_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    broken = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]

    assert broken == []
