"""Reads and parses a caller's JSON within bounds, validates it, and words errors as OpenAI does.

pydantic collects all errors of a body, a thousand bytes per error, but only the first is reported. A field
with many values must therefore stop at the first error (`Field(fail_fast=True)`, for lists) or be counted
first.

Messages never contain the sent value, which may be megabytes of base64, except a number or the beginning of
a word that was not a valid choice.
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticKnownError, from_json

from omni_server.errors import InvalidRequestError, RequestTooLargeError

Model = TypeVar("Model", bound=BaseModel)

MAX_JSON_MARKS = 1 << 18
"""Commas and opening brackets. A value of three bytes in the body takes up to a hundred bytes of memory when
parsed, and more than a thousand if it is invalid. Text has such marks, too; a chat as long as a model's
context has a tenth of this number."""

_MARKS = ",[{"
_PARSE_INLINE_BYTES = 64 * 1024
"""Parsing bodies up to this size takes well under a millisecond; a thread would cost more."""
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


async def read_json(request: Request) -> object:
    """Parses the body, whose size `omni_server.api.limits.BodyLimitMiddleware` bounds.

    Raises `InvalidRequestError` if it is not JSON by RFC 8259 (NaN and lone surrogates are not, and nesting
    is limited to 200 levels), `RequestTooLargeError`, also for too many values, or `ClientDisconnect` if the
    client disconnects.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )
    if not is_json:
        raise InvalidRequestError(
            "Unsupported media type: only 'Content-Type: application/json' is accepted.",
            code="invalid_content_type",
        )
    data = bytearray()  # not `request.body()`, which the request would keep
    async for chunk in request.stream():
        data += chunk
    return _parse(data) if len(data) <= _PARSE_INLINE_BYTES else await asyncio.to_thread(_parse, data)


def _parse(data: bytearray) -> object:
    if has_too_many_values(data):
        raise RequestTooLargeError(
            "The request body has more values than this server reads: "
            f"more than {MAX_JSON_MARKS} commas and brackets.",
            code="too_many_values",
        )
    try:
        parsed: object = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(
            f"The request body is not valid JSON: {error}.", code="invalid_json"
        ) from None
    return parsed


def has_too_many_values(text: bytearray | str) -> bool:
    """Every value but the outermost one follows one of these marks."""
    counts = map(text.count, _MARKS) if isinstance(text, str) else map(text.count, _MARKS.encode())
    return sum(counts) > MAX_JSON_MARKS


def at_most(max_keys: int) -> BeforeValidator:
    """Annotates dicts."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > max_keys:
            raise PydanticKnownError(
                "too_long", {"field_type": "Dictionary", "max_length": max_keys, "actual_length": len(value)}
            )
        return value

    return BeforeValidator(check)


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
    at_most(16),
]


def _without_fraction(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_without_fraction)]
"""Also accepts 5.0, which is an integer in JSON Schema, the API's description language."""
_INT64_MAX = 2**63 - 1
Seed = Annotated[Integer, Field(ge=-_INT64_MAX - 1, le=_INT64_MAX)]


class ExactModel(BaseModel):
    """Validates JSON types strictly and reports the first unknown key."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _keep_first_unknown(cls, value: Any) -> Any:  # noqa: ANN401 (pydantic's signature)
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        first = next((key for key in value if key not in known), None)
        return {key: given for key, given in value.items() if key in known or key == first}


def validate(schema: type[Model], body: object) -> Model:
    """Validates `body`, parsed JSON, as a `schema`. Raises `InvalidRequestError` for the first
    error."""
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise _invalid_request(error.errors(include_url=False)[0], body) from None


def missing_parameter(param: str, hint: str = "") -> InvalidRequestError:
    return InvalidRequestError(
        f"Missing required parameter: '{param}'{hint}.", param=param, code="missing_required_parameter"
    )


def unsupported(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code="unsupported_value")


def unsupported_choice(
    param: str, name: str, supported: Sequence[str], reason: str = ""
) -> InvalidRequestError:
    """Reports that `name` is not a `supported` value of `param`."""
    values = ", ".join(f"'{value}'" for value in supported)
    return unsupported(
        f"Unsupported value: '{param}' does not support '{name[:_MAX_SHOWN]}'{reason}. "
        f"Supported values are: {values}.",
        param,
    )


def parameter_path(location: Sequence[int | str], body: object, *, may_lack_last: bool = True) -> str:
    """Formats pydantic's `loc` like `messages[0].content[1].input_audio.data`.

    `loc` also contains the tags of union branches, which are not keys of `body`; following `body` identifies
    them. With `may_lack_last`, a last part that `body` lacks is kept, because it names what is
    missing.
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
    kind, given, context = error["type"], error["input"], error.get("ctx", {})
    # Any other value exists; only tags of branches follow.
    param = parameter_path(error["loc"], body, may_lack_last=kind == "missing")
    if not param:
        return InvalidRequestError("The request body must be a JSON object.", code="invalid_type")
    if kind == "missing":
        return missing_parameter(param)
    if kind == "union_tag_not_found" and isinstance(given, dict):
        return missing_parameter(f"{param}.type")
    code = "invalid_value"
    if kind == "extra_forbidden":
        message, code = f"Unknown parameter: '{param}'.", "unknown_parameter"
    elif kind == "union_tag_invalid":
        message = (
            f"Invalid value: {_shown(context['tag'])}. Supported values are: {context['expected_tags']}."
        )
        discriminator = context["discriminator"]  # a field in quotes, or a function
        param += "." + (discriminator.strip("'") if "'" in discriminator else "type")
    elif kind == "literal_error":
        message = f"Invalid value: {_shown(given)}. Supported values are: {context['expected']}."
    elif kind in _EXPECTED_TYPES:
        expected, code = _EXPECTED_TYPES[kind], "invalid_type"
        message = f"Invalid type for '{param}': expected {expected}, but got {_json_type(given)} instead."
    elif kind in _COMPARISONS:
        sign, bound, code = _COMPARISONS[kind]
        number = context[bound] if isinstance(given, str) else given  # forms have strings
        code = f"{'integer' if isinstance(number, int) else 'decimal'}_{code}"
        message = f"Invalid '{param}': expected a value {sign} {context[bound]}."
    elif kind in ("too_short", "string_too_short"):
        subject = "array" if kind == "too_short" else "string"
        message, code = f"Invalid '{param}': the {subject} must not be empty.", f"empty_{subject}"
    elif kind == "string_too_long":
        message = f"Invalid '{param}': at most {context['max_length']} characters are allowed."
        code = "string_above_max_length"
    elif kind == "too_long":
        message = f"Invalid '{param}': at most {context['max_length']} items are allowed."
        code = "array_above_max_length" if isinstance(given, list) else "object_above_max_properties"
    else:
        message = f"Invalid '{param}': {error['msg']}."
    return InvalidRequestError(message, param=param, code=code)


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
