"""The fields of a chat request that say what the text must look like."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from omni_server.api.bounds import ExactModel

_TOLERANT = ConfigDict(strict=True, extra="ignore")


class TextFormat(BaseModel):
    model_config = _TOLERANT
    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    model_config = _TOLERANT
    type: Literal["json_object"]


class JsonSchema(BaseModel):
    model_config = _TOLERANT
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """Without it, any object will do."""


class JsonSchemaFormat(BaseModel):
    model_config = _TOLERANT
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(ExactModel):
    """vLLM's extension. One of its fields must be given."""

    json_schema: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, fail_fast=True)] | None = None
    grammar: str | None = None
    """EBNF or Lark."""
    structural_tag: str | None = None
    """xgrammar's, as JSON."""
