"""The base class of all parts of a stage config."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Self

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

UNKNOWN_KEY = "unknown_key"
"""Error type for an unknown key; the message suggests the key that may be meant."""


class FrozenModel(BaseModel):
    """A mapping of the file. Unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="wrap")
    @classmethod
    def _explain_unknown_keys(cls, value: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(value)
        except ValidationError as error:
            known = [field.alias or name for name, field in cls.model_fields.items()]
            lines = [_explained(problem, known) for problem in error.errors(include_url=False)]
            raise ValidationError.from_exception_data(cls.__name__, lines) from None

    @field_validator("*")
    @classmethod
    def _check_range(cls, value: object, info: ValidationInfo) -> object:
        """vLLM and torch hold counts in 32 bits, and seeds in 64."""
        bits = 64 if info.field_name == "seed" else 32
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
                raise ValueError(f"must fit into {bits} bits")
        return value


def _explained(problem: ErrorDetails, known: Sequence[str]) -> InitErrorDetails:
    kind: str | PydanticCustomError = problem["type"]
    context = problem.get("ctx", {})
    if kind == "extra_forbidden" and len(problem["loc"]) == 1:
        close = get_close_matches(str(problem["loc"][0]), known, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"known are {', '.join(known)}"
        kind, context = UNKNOWN_KEY, {"hint": hint}
    if kind == UNKNOWN_KEY:  # also of a mapping inside
        kind = PydanticCustomError(UNKNOWN_KEY, "unknown key; {hint}", context)
    return InitErrorDetails(type=kind, loc=problem["loc"], input=problem["input"], ctx=context)


@dataclass(frozen=True)
class Declared:
    """A mapping of the file, and the model that the family declares for it."""

    model: type[BaseModel]
    mapping: dict[str, object]


def as_declared(value: object) -> object:
    """Validator for a field that accepts any subclass of its type: validates as the declared model."""
    return value.model.model_validate(value.mapping) if isinstance(value, Declared) else value
