"""Messages for pydantic's validation errors in a stage config: field path, problem, hint."""

from difflib import get_close_matches
from reprlib import Repr

from pydantic import ValidationError
from pydantic_core import ErrorDetails

Location = tuple[int | str, ...]

_short = Repr()
_short.maxstring = _short.maxlong = _short.maxother = 100
_short.maxlevel = 2


def problems_of(error: ValidationError) -> list[tuple[Location, str]]:
    """Where each problem is, as pydantic says it, and a line about it, for example:

    `stages.talker.max_num_seq: unknown key; did you mean 'max_num_seqs'?`
    """
    return [(details["loc"], _describe(details)) for details in error.errors(include_url=False)]


def _describe(details: ErrorDetails) -> str:
    location = details["loc"]
    path = _path(location)
    match details["type"]:
        case "unknown_key":
            return f"{path}: {details['msg']}"
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
            return (
                f"{path}: a stage's name is lower-case letters, digits and underscores, and begins with a "
                "letter"
            )
        case "string_pattern_mismatch":
            return f"{path}: must look like 'package.module:name', not {_shown(details['input'])}"
        case "literal_error":
            expected, found = details["ctx"]["expected"], _shown(details["input"])
            return f"{path}: must be {expected}, not {found}{_choice_hint(details)}"
        case _:
            message = details["msg"].replace("Input should be", "must be", 1)
            return f"{path}: {message}, not {_shown(details['input'])}"


def _shown(value: object) -> str:
    """The beginning of `repr(value)`: nested aliases can expand a page of YAML to gigabytes."""
    return _short.repr(value)


def _path(location: Location) -> str:
    """`stages.talker.devices[1]`, without the engine that pydantic inserts after the name of a stage."""
    path = ""
    for place, item in enumerate(location):
        if item == "[key]" or (location[0] == "stages" and place == 2 and item in ("ar", "diffusion")):
            continue
        path += f"[{item}]" if isinstance(item, int) else f".{item}"
    return path.removeprefix(".")


def _choice_hint(details: ErrorDetails) -> str:
    choices = details["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
    close = get_close_matches(details["input"], choices, n=1) if isinstance(details["input"], str) else []
    return f"; did you mean '{close[0]}'?" if close else ""
