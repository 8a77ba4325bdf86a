"""The reference of a stage config's fields, as tables in Markdown, made from the pydantic models themselves.

docs/configuration.md has a pair of comments for each table, `<!-- fields of Edge -->` and `<!-- end of fields
-->`; what stands between them is generated (scripts/make_config_reference).
"""

import json
import re
from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from omni_server.config.chunk_plan import BusyChunks, ChunkPlan, PacingConfig
from omni_server.config.frozen_model import FrozenModel
from omni_server.config.pipeline import Pipeline
from omni_server.config.stage_config import Edge, QueueConfig, StageConfig, SupervisionConfig
from omni_server.config.stages import ArStage, CommonStage, DiffusionStage, SamplingDefaults
from omni_server.errors import ConfigError

MODELS: dict[str, type[BaseModel]] = {
    model.__name__: model
    for model in (
        StageConfig, CommonStage, ArStage, SamplingDefaults, DiffusionStage, Edge, QueueConfig, ChunkPlan, BusyChunks,
        PacingConfig, SupervisionConfig,
    )
}  # fmt: skip
"""Every kind of mapping in the stage config of any family, by name."""

_TABLE = re.compile(r"(<!-- fields of (\w+) -->\n).*?(<!-- end of fields -->)", re.DOTALL)
_PLAIN = {int: "integer", float: "number", str: "string", bool: "`true` or `false`"}


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
    rows = ["| field | type | default | description |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        if name not in model.__annotations__:
            continue
        if not field.description:
            raise ConfigError(f"{model.__name__}.{name} has no description")
        cells = [
            f"`{field.alias or name}`",
            _type(field.annotation, field.metadata),
            _default(field),
            " ".join(field.description.split()),
        ]
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows)


def _type(annotation: object, metadata: Sequence[object]) -> str:
    """In words, with the bounds that `metadata` sets."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner, *more = arguments
        return _type(inner, [*metadata, *_unpacked(more)])
    if origin in (Union, UnionType):
        present = [_type(member, metadata) for member in arguments if member is not type(None)]
        return "; or ".join([*present, "`null`"] if type(None) in arguments else present)
    if origin is Literal:
        *others, last = (f"`{value}`" for value in arguments)
        return f"{', '.join(others)} or {last}" if others else last
    if origin is tuple:
        each = _type(arguments[0], ())
        return "list of mappings" if each == "mapping" else f"list; each {each}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    if any(hasattr(item, "pattern") for item in metadata):  # pydantic's own class for it is private
        return "`package.module:name`"
    assert isinstance(annotation, type)
    return _PLAIN[annotation] + _bounds(metadata)


def _unpacked(metadata: Sequence[object]) -> list[object]:
    """What stands in `Annotated`, with what a `Field(...)` there holds."""
    return [part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else [item])]


def _bounds(metadata: Sequence[object]) -> str:
    """`, 0 to 2`; `, more than 0`."""
    low, high = "", ""
    for item in metadata:
        match item:
            case Ge(ge=bound):
                low = f"at least {bound}"
            case Gt(gt=bound):
                low = f"more than {bound}"
            case Le(le=bound):
                high = f"at most {bound}"
            case Lt(lt=bound):
                high = f"less than {bound}"
    return "".join(f", {bound}" for bound in (low, high) if bound)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: object = field.get_default(call_default_factory=True)
    match value:
        case BaseModel():
            return "its defaults"
        case tuple():
            return f"`{json.dumps(list(value))}`" if value else "none"
        case dict():
            return "none"
    return f"`{json.dumps(value) if not isinstance(value, str) else value}`"
