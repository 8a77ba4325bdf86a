"""pydantic's errors in OpenAI's words: which parameter, what was expected, which code.

Messages never hold the value that was sent, except a number or the beginning of a word that was no valid choice: it may
be megabytes of base64.
"""

import json
from collections.abc import Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from omni_server.errors import InvalidRequestError

Model = TypeVar("Model", bound=BaseModel)

_MAX_SHOWN = 64
_MAX_SHOWN_INTEGER = 2**63
_MAX_PATH = 200

_EXPECTED_TYPES = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "union_tag_not_found": "a string or an array",
}
_COMPARISONS = {
    "greater_than_equal": (">=", "ge", "below_min_value"),
    "greater_than": (">", "gt", "below_min_value"),
    "less_than_equal": ("<=", "le", "above_max_value"),
    "less_than": ("<", "lt", "above_max_value"),
}


def validate(schema: type[Model], body: object) -> Model:
    """`body`, parsed JSON, as a `schema`. Raises `InvalidRequestError` for the first thing that is wrong with it."""
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise _invalid_request(error.errors(include_url=False)[0], body) from None


def parameter_path(location: Sequence[int | str], body: object, *, may_lack_last: bool = True) -> str:
    """pydantic's `loc` as `messages[0].content[1].input_audio.data`.

    `loc` also holds the tags of the union branches that were taken, which are no keys of `body`; they are told
    apart by following `body`. The last part is kept where `body` lacks it, if that may be: it names what is missing.
    """
    path = ""
    here = body
    for position, key in enumerate(location):
        is_last = position == len(location) - 1
        if isinstance(key, int) and isinstance(here, list) and key < len(here):
            path += f"[{key}]"
            here = here[key]
        elif isinstance(key, str) and isinstance(here, dict) and (key in here or (is_last and may_lack_last)):
            path += f".{key}" if path else key
            here = here.get(key)
    return path[:_MAX_PATH]


def _invalid_request(error: ErrorDetails, body: object) -> InvalidRequestError:
    kind, context = error["type"], error.get("ctx", {})
    # What lacks a branch is there; behind it come only the tags of branches around.
    param = parameter_path(error["loc"], body, may_lack_last=not kind.startswith("union_tag"))
    if not param:
        return InvalidRequestError("The request body must be a JSON object.", code="invalid_type")
    if kind == "missing":
        return InvalidRequestError(
            f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
        )
    if kind == "extra_forbidden":
        return InvalidRequestError(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    if kind == "union_tag_not_found" and isinstance(error["input"], dict):
        param += ".type"
        return InvalidRequestError(
            f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
        )
    if kind == "union_tag_invalid":
        discriminator = context["discriminator"].strip("'")
        return InvalidRequestError(
            f"Invalid value: {_shown(context['tag'])}. Supported values are: {context['expected_tags']}.",
            param=f"{param}.{discriminator}",
        )
    if kind == "literal_error":
        return InvalidRequestError(
            f"Invalid value: {_shown(error['input'])}. Supported values are: {context['expected']}.", param=param
        )
    if kind in _EXPECTED_TYPES:
        expected, got = _EXPECTED_TYPES[kind], _json_type(error["input"])
        return InvalidRequestError(
            f"Invalid type for '{param}': expected {expected}, but got {got} instead.",
            param=param,
            code="invalid_type",
        )
    if kind in _COMPARISONS:
        sign, bound, code = _COMPARISONS[kind]
        number = "integer" if isinstance(error["input"], int) else "decimal"
        return InvalidRequestError(
            f"Invalid '{param}': expected a value {sign} {context[bound]}.", param=param, code=f"{number}_{code}"
        )
    if kind in ("too_short", "string_too_short"):
        subject = "array" if kind == "too_short" else "string"
        return InvalidRequestError(
            f"Invalid '{param}': the {subject} must not be empty.", param=param, code=f"empty_{subject}"
        )
    if kind == "string_too_long":
        return InvalidRequestError(
            f"Invalid '{param}': at most {context['max_length']} characters are allowed.",
            param=param,
            code="string_above_max_length",
        )
    if kind == "too_long":
        return InvalidRequestError(
            f"Invalid '{param}': at most {context['max_length']} items are allowed.",
            param=param,
            code="array_above_max_length" if isinstance(error["input"], list) else "object_above_max_properties",
        )
    return InvalidRequestError(f"Invalid '{param}': {error['msg']}.", param=param)


def _shown(value: object) -> str:
    if isinstance(value, str):
        return f"'{value[:_MAX_SHOWN]}'" + ("..." if len(value) > _MAX_SHOWN else "")
    is_short = isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < _MAX_SHOWN_INTEGER)
    return json.dumps(value) if is_short else _json_type(value)


def _json_type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a decimal"
        case str():
            return "a string"
        case list():
            return "an array"
    return "an object"
