"""The fields of a chat request that concern tools: definitions, choice, and calls of earlier turns."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

_TOLERANT = ConfigDict(strict=True, extra="ignore")

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionDefinition(BaseModel):
    model_config = _TOLERANT
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; without it, the function takes none."""
    strict: bool | None = None
    """Hold the arguments to the schema, also where the model is free to call or not."""


class Tool(BaseModel):
    model_config = _TOLERANT
    type: Literal["function"]
    function: FunctionDefinition


class ToolName(BaseModel):
    model_config = _TOLERANT
    name: str


class NamedTool(BaseModel):
    model_config = _TOLERANT
    type: Literal["function"]
    function: ToolName


class AllowedTools(BaseModel):
    model_config = _TOLERANT
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, fail_fast=True)]


class AllowedToolsChoice(BaseModel):
    model_config = _TOLERANT
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_kind(choice: object) -> str:
    if isinstance(choice, str):
        return "word"
    return "allowed_tools" if isinstance(choice, dict) and choice.get("type") == "allowed_tools" else "function"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedToolsChoice, Tag("allowed_tools")],
    Discriminator(_choice_kind),
]


class CalledFunction(BaseModel):
    model_config = _TOLERANT
    name: Annotated[str, Field(min_length=1)]
    arguments: str | None = None


class PastToolCall(BaseModel):
    model_config = _TOLERANT
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction
