"""docs/configuration.md and docs/faq.md keep up with the code."""

from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter

from omni_server.config.pipeline import find_family
from scripts.config_reference import MODELS, family_models, filled_in

ROOT = Path(__file__).parents[3]
PIPELINES = [find_family(f"stages.{name}:FAMILY").pipeline for name in ("qwen2_5_omni", "diffusers")]
PAGE = (ROOT / "docs" / "configuration.md").read_text()
DOCUMENTED = MODELS | {k: v for line in PIPELINES for k, v in family_models(line).items()}


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    assert filled_in(PAGE, *PIPELINES) == PAGE, "run scripts/make_config_reference"


@pytest.mark.parametrize("model", DOCUMENTED.values(), ids=DOCUMENTED)
def test_no_kind_of_mapping_is_left_out(model: type[BaseModel]) -> None:
    """Models inside fields of documented models are documented too."""
    inner = {cls for field in model.model_fields.values() for cls in _models_in(field.annotation)}

    assert inner <= set(DOCUMENTED.values())


@pytest.mark.parametrize("model", DOCUMENTED.values(), ids=DOCUMENTED)
def test_a_word_that_yaml_reads_as_something_else_is_accepted_as_documented(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        for word in _words_in(field.annotation):
            as_field = TypeAdapter(Annotated[field.annotation, name, *field.metadata])
            assert as_field.validate_python(yaml.safe_load(word)) == word


def _words_in(annotation: object) -> set[str]:
    if get_origin(annotation) is Literal:
        return {word for word in get_args(annotation) if isinstance(word, str)}
    return set().union(*(_words_in(argument) for argument in get_args(annotation)))


def _models_in(annotation: object) -> set[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return set().union(*(_models_in(argument) for argument in get_args(annotation)))
