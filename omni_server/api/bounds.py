"""Bounds that are looked at before what they bound.

pydantic notes everything that is wrong with a body, a thousand bytes for each fault, and only the first is told: what a
caller may send many of must end with the first fault (`Field(fail_fast=True)`, for lists) or be counted first.
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticKnownError


def at_most(max_keys: int) -> BeforeValidator:
    """Annotates a dict."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > max_keys:
            raise PydanticKnownError(
                "too_long", {"field_type": "Dictionary", "max_length": max_keys, "actual_length": len(value)}
            )
        return value

    return BeforeValidator(check)


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16), at_most(16)
]


def _without_fraction(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_without_fraction)]
"""Takes 5.0 as well: JSON Schema, in which the API is described, calls that an integer."""


class ExactModel(BaseModel):
    """JSON's types as they are, and no unknown key: the first one is told."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _keep_first_unknown(cls, value: Any) -> Any:  # noqa: ANN401 (pydantic's signature)
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        first = next((key for key in value if key not in known), None)
        return {key: given for key, given in value.items() if key in known or key == first}
