"""The reference of a stage config's fields, as tables in Markdown, made from the JSON schemas of the models.

docs/configuration.md has a pair of comments for each table, `<!-- fields of Edge -->` and `<!-- end of fields
-->`; what stands between them is generated (scripts/make_config_reference).
"""

import json
import re

from pydantic import BaseModel, JsonValue

from omni_server.config.chunk_plan import BusyChunks, ChunkPlan
from omni_server.config.frozen_model import FrozenModel
from omni_server.config.pipeline import Pipeline
from omni_server.config.stage_config import Edge, QueueConfig, StageConfig, SupervisionConfig
from omni_server.config.stages import (
    ArStage,
    CommonStage,
    DiffusionStage,
    PredictorSampling,
    SamplingDefaults,
)
from omni_server.errors import ConfigError

Schema = dict[str, JsonValue]

MODELS: dict[str, type[BaseModel]] = {
    model.__name__: model
    for model in (
        StageConfig, CommonStage, ArStage, SamplingDefaults, PredictorSampling, DiffusionStage, Edge, QueueConfig,
        ChunkPlan, BusyChunks, SupervisionConfig,
    )
}  # fmt: skip
"""Every kind of mapping in the stage config of any family, by name."""

_TABLE = re.compile(r"(<!-- fields of (\w+) -->\n).*?(<!-- end of fields -->)", re.DOTALL)
_PLAIN = {"integer": "integer", "number": "number", "string": "string", "boolean": "`true` or `false`"}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
}


def family_models(pipeline: Pipeline) -> dict[str, type[BaseModel]]:
    """The kinds of mappings that a family adds, by name: the classes that its stages and edges declare, and
    those of their fields."""
    declared: list[type[BaseModel]] = [stage.config for stage in pipeline.stages.values()]
    declared += [type(edge.chunks) for edge in pipeline.edges if edge.chunks is not None]
    models: dict[str, type[BaseModel]] = {}
    while declared:
        model = declared.pop(0)
        if model.__name__ not in MODELS | models:
            models[model.__name__] = model
            fields = [field.annotation for field in model.model_fields.values()]
            declared += [kind for kind in fields if isinstance(kind, type) and issubclass(kind, FrozenModel)]
    return models


def filled_in(page: str, *pipelines: Pipeline) -> str:
    """`page` with every table as it should be, those of the families with `pipelines` included. Raises
    `ConfigError` if a table is missing or of an unknown model."""
    models = MODELS | {name: model for line in pipelines for name, model in family_models(line).items()}
    found = [match[2] for match in _TABLE.finditer(page)]
    if sorted(found) != sorted(models):
        raise ConfigError(
            f"the page has the tables {', '.join(found)}; it should have {', '.join(models)}, each once"
        )
    return _TABLE.sub(lambda match: f"{match[1]}\n{field_table(models[match[2]])}\n\n{match[3]}", page)


def field_table(model: type[BaseModel]) -> str:
    """A row for each field that `model` itself declares: name in the file, type and bounds, default,
    description.

    Raises `ConfigError` if one has no description.
    """
    document = model.model_json_schema(by_alias=True)
    rows = ["| field | type | default | description |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        if name not in model.__annotations__:
            continue
        if not field.description:
            raise ConfigError(f"{model.__name__}.{name} has no description")
        key = field.alias or name
        schema = document["properties"][key]
        default = "required" if field.is_required() else _default(schema)
        cells = (f"`{key}`", _type(schema), default, " ".join(field.description.split()))
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows)


def _type(schema: Schema) -> str:
    """In words, with the bounds."""
    match schema:
        case {"anyOf": [*members]}:
            return "; or ".join(
                "`null`" if member == {"type": "null"} else _type(member) for member in members
            )
        case {"const": value}:
            return f"`{value}`"
        case {"enum": [*others, last]}:
            return f"{', '.join(f'`{value}`' for value in others)} or `{last}`"
        case {"type": "array", "items": items}:
            each = _type(items)
            return "list of mappings" if each == "mapping" else f"list; each {each}"
        case {"$ref": _} | {"type": "object"}:
            return "mapping"
        case {"pattern": _}:
            return "`package.module:name`"
    bounds = [f", {words} {schema[key]}" for key, words in _BOUNDS.items() if key in schema]
    return _PLAIN[schema["type"]] + "".join(bounds)


def _default(schema: Schema) -> str:
    match schema:
        case {"$ref": _, "default": _}:
            return "its defaults"
        case {"default": []} | {"type": "object"}:
            return "none"
        case {"default": str(text)}:
            return f"`{text}`"
    return f"`{json.dumps(schema['default'])}`"
