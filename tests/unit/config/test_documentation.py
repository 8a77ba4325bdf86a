"""docs/configuration.md and docs/faq.md keep up with the code."""

import re
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter

from omni_server.config.load import shipped_configs
from omni_server.config.pipeline import find_family
from omni_server.config.stage_config import Edge
from omni_server.config.stages import ArStage, SamplingDefaults
from omni_server.errors import ConfigError
from scripts.config_reference import MODELS, family_models, field_table, filled_in

ROOT = Path(__file__).parents[3]
PIPELINES = [find_family(f"stages.{name}:FAMILY").pipeline for name in ("qwen2_5_omni", "diffusers")]
PAGE = (ROOT / "docs" / "configuration.md").read_text()
DOCUMENTED = MODELS | {k: v for line in PIPELINES for k, v in family_models(line).items()}


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    assert filled_in(PAGE, *PIPELINES) == PAGE, "run scripts/make_config_reference"


def test_every_field_is_in_a_table() -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE))

    for model in DOCUMENTED.values():
        assert {field.alias or name for name, field in model.model_fields.items()} <= documented


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


def test_types_bounds_and_defaults_are_in_words() -> None:
    rows = {line.split("`")[1]: line for line in field_table(ArStage).splitlines()[2:]}

    assert rows["tensor_parallel_size"].startswith(
        "| `tensor_parallel_size` | integer, at least 1 | `1` | Ranks"
    )
    assert "| `temperature` | number, at least 0, at most 2; or `null` | `null` |" in field_table(
        SamplingDefaults
    )
    assert "| `function` | `package.module:name`; or `null` | `null` |" in field_table(Edge)


def test_a_field_without_a_description_is_refused() -> None:
    class Silent(BaseModel):
        loud: int

    with pytest.raises(ConfigError, match=r"Silent\.loud has no description"):
        field_table(Silent)


def test_a_page_without_one_of_the_tables_is_refused() -> None:
    with pytest.raises(ConfigError, match="it should have"):
        filled_in(PAGE.replace("<!-- fields of Edge -->", ""), *PIPELINES)


def test_every_shipped_config_is_in_the_faq() -> None:
    faq = (ROOT / "docs" / "faq.md").read_text()

    assert all(f"| `{name}` |" in faq for name in shipped_configs())


def test_links_between_the_documents_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    broken = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]

    assert broken == []
