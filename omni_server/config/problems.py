"""Words for what pydantic found wrong with a stage config: field path, problem, hint."""

from difflib import get_close_matches
from reprlib import Repr
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from omni_server.config.stage_config import StageConfig

Location = tuple[int | str, ...]

_short = Repr()
_short.maxstring = _short.maxlong = _short.maxother = 100
_short.maxlevel = 2


def describe_problems(error: ValidationError) -> list[str]:
    """One line per problem, for example:

    `stages.talker.max_num_seq: unknown key; did you mean 'max_num_seqs'?`
    """
    return [_describe(details) for details in error.errors(include_url=False)]


def problem_locations(error: ValidationError) -> list[Location]:
    """Where each of these problems is, as pydantic says it."""
    return [details["loc"] for details in error.errors(include_url=False)]


def _describe(details: ErrorDetails) -> str:
    location = details["loc"]
    path = _path(location)
    match details["type"]:
        case "extra_forbidden":
            return f"{path}: unknown key; {_key_hint(location)}"
        case "missing":
            return f"{path}: missing"
        case "value_error":
            message = details["msg"].removeprefix("Value error, ")
            return f"{path}: {message}" if path else message
        case "union_tag_not_found":
            return f"{path}.engine: missing; write 'engine: ar' or 'engine: diffusion'"
        case "union_tag_invalid":
            tag = details["ctx"]["tag"]
            return f"{path}.engine: must be 'ar' or 'diffusion', not '{tag}'"
        case "string_pattern_mismatch" if location[-1] == "[key]":
            return f"{path}: a stage's name is lower-case letters, digits and underscores, and begins with a letter"
        case "string_pattern_mismatch":
            return f"{path}: must look like 'package.module:name', not {_shown(details['input'])}"
        case "literal_error":
            expected, found = details["ctx"]["expected"], _shown(details["input"])
            return f"{path}: must be {expected}, not {found}{_choice_hint(details)}"
        case _:
            message = details["msg"].replace("Input should be", "must be", 1)
            return f"{path}: {message}, not {_shown(details['input'])}"


def _shown(value: object) -> str:
    """Its beginning: aliases of aliases make gigabytes of a page of YAML."""
    return _short.repr(value)


def _path(location: Location) -> str:
    """`stages.talker.devices[1]`; the union tags that pydantic puts in between are left out."""
    path = ""
    annotation: object = StageConfig
    for item in location:
        is_tag = _is_union(annotation)
        annotation = _step(annotation, item)
        if is_tag or item == "[key]":
            continue
        path += f"[{item}]" if isinstance(item, int) else f".{item}"
    return path.removeprefix(".")


def _key_hint(location: Location) -> str:
    annotation: object = StageConfig
    for item in location[:-1]:
        annotation = _step(annotation, item)
    known = _keys(annotation)
    close = get_close_matches(str(location[-1]), known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known are {', '.join(known)}"


def _choice_hint(details: ErrorDetails) -> str:
    choices = details["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
    close = get_close_matches(details["input"], choices, n=1) if isinstance(details["input"], str) else []
    return f"; did you mean '{close[0]}'?" if close else ""


def _step(annotation: object, item: int | str) -> object:
    """The type found under `item` in a value of the type `annotation`; None outside the config's own
    types."""
    annotation = _bare(annotation)
    if _is_union(annotation):
        return next((model for model in get_args(annotation) if _tag(model) == item), None)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = annotation.model_fields
        return next((f.annotation for name, f in fields.items() if item in (name, f.alias)), None)
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return arguments[1]
    if get_origin(annotation) is tuple:
        return arguments[0]
    return None


def _bare(annotation: object) -> object:
    """`annotation` without `Annotated` and without `| None`."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        present = [_bare(member) for member in get_args(annotation) if member is not type(None)]
        if len(present) == 1:
            return present[0]
    return annotation


def _is_union(annotation: object) -> bool:
    return get_origin(_bare(annotation)) in (Union, UnionType)


def _tag(model: type[BaseModel]) -> str | None:
    """The value of `engine` that stands for this kind of stage."""
    field = model.model_fields.get("engine")
    if field is None or get_origin(field.annotation) is not Literal:
        return None
    return str(get_args(field.annotation)[0])


def _keys(annotation: object) -> list[str]:
    model = _bare(annotation)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return []
    return [field.alias or name for name, field in model.model_fields.items()]
